"""From a configuration to a running worker: loads the model, sizes the KV pool, serves. Imports torch (indirectly:
`worker.model` must be imported before it, for the settings that it makes)."""

import os
import sys
from collections.abc import Iterator

import structlog

from worker.app import Worker, check_kafka, run_until_signal
from worker.config import WorkerConfig
from worker.model.errors import ModelError
from worker.model.kv_cache import num_blocks_for_ram
from worker.model.loader import LoadedModel, load_model
from worker.model.runner import TorchRunner
from worker.prepare import ModelFacts
from worker.telemetry import start_telemetry
from worker.transport.kafka_connections import KafkaUnavailable

log = structlog.get_logger(__name__)


async def start(config: WorkerConfig) -> None:
    """Runs a worker until a signal. Ends the process with status 1 and a sentence when it cannot run."""
    start_telemetry(config.worker, config.log_level, config.log_format == "json")
    try:
        await check_kafka(config)  # first: a wrong address should not cost the time to load a model
        model, runner, num_blocks = build(config)
        await run_until_signal(Worker(config, model, runner, num_blocks, on_ready=_print_ready))
    except* (ModelError, KafkaUnavailable) as group:
        for error in _leaves(group):
            print(f"carousel worker: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from _leaves(part)
    else:
        yield error


def build(config: WorkerConfig) -> tuple[ModelFacts, TorchRunner, int]:
    """Loads the model and makes its runner: (facts, runner, blocks in the KV pool)."""
    num_threads = config.num_threads or os.cpu_count() or 1
    loaded = load_model(config.model, dtype=config.dtype, progress=_log_progress)
    num_blocks = config.num_blocks or num_blocks_for_ram(
        loaded.bytes_per_token,
        config.block_size,
        loaded.max_model_len,
        config.max_num_seqs,
        share=config.kv_memory_share,
    )
    runner = TorchRunner(
        loaded,
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_threads=num_threads,
    )
    log.info(
        "model.loaded",
        model=loaded.name,
        dtype=config.dtype,
        num_blocks=num_blocks,
        kv_tokens=num_blocks * config.block_size,
        kv_bytes=num_blocks * config.block_size * loaded.bytes_per_token,
        threads=num_threads,
    )
    return model_facts(loaded), runner, num_blocks


def model_facts(loaded: LoadedModel) -> ModelFacts:
    return ModelFacts(loaded.name, loaded.vocab_size, loaded.max_model_len, loaded.eos_token_ids, loaded.tokenizer)


def _log_progress(what: str, share: float) -> None:
    log.info("model.progress", doing=what, percent=round(share * 100))


def _print_ready() -> None:
    print("ready", flush=True)
