"""What a worker says and does while it starts."""

import gc

import pytest
import structlog

from worker import start
from worker.config import WorkerConfig
from worker.model import kv_cache
from worker.model.loader import load_model
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


@pytest.mark.parametrize(
    ("share", "given", "host"),
    [(0.3, None, 300), (0.5, None, 400), (0.9, None, 0), (0.9, 50, 50)],
)
def test_both_pools_fit_into_the_memory_that_they_share(
    monkeypatch: pytest.MonkeyPatch, share: float, given: int | None, host: int
) -> None:
    """On a CPU the pool for swaps is in the same memory; touched late, it would be found out under load."""
    config = WorkerConfig(model="tiny", kv_memory_share=share, num_host_blocks=given, weights="plain")
    loaded = load_model("tiny")
    free = 1000 * config.block_size * loaded.bytes_per_token
    for module in (start, kv_cache):
        monkeypatch.setattr(module, "available_ram", lambda: free)
    runner, num_blocks, num_host_blocks = start._cpu_runner(config, loaded, 1)
    assert (num_blocks, num_host_blocks) == (int(1000 * share), host)
    assert len(runner._host_cache.blocks) == host
