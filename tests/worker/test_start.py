"""What a worker says while it starts."""

import structlog

from worker.start import _progress_log


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
