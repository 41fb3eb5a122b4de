"""What a worker says and does while it starts."""

import gc

import structlog

from worker.start import _freeze_heap, _progress_log


def test_progress_is_said_in_steps() -> None:
    """A loader that reports every tensor does not fill the log; a new activity is said at once."""
    report = _progress_log()
    with structlog.testing.capture_logs() as entries:
        report("loading the tokenizer", 0.8)
        for i in range(300):
            report("loading the weights", 0.85 + 0.1 * i / 300)
        report("trying it out", 0.95)
    said = [(entry["doing"], entry["percent"]) for entry in entries]
    assert said == [
        ("loading the tokenizer", 80),
        ("loading the weights", 85),
        ("loading the weights", 90),
        ("loading the weights", 95),
        ("trying it out", 95),
    ]


def test_what_is_there_to_stay_is_not_looked_through_again() -> None:
    there = len(gc.get_objects())
    _freeze_heap()
    try:
        assert gc.get_freeze_count() > there / 2
        assert len(gc.get_objects()) < there / 100
    finally:
        gc.unfreeze()
