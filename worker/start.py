"""From a configuration to a running worker: loads the model, sizes the KV pool, serves. Imports torch (indirectly:
`worker.model` must be imported before it, for the settings that it makes)."""

import asyncio
import contextlib
import gc
import sys
from collections.abc import Callable, Iterator

import structlog
from rich.console import Console
from rich.progress import Progress, TaskID

from schemas.exporting import Exporting
from schemas.topics import reply_topic
from worker.app import Worker, check_kafka, run_until_signal
from worker.config import MAX_KV_SHARE, WorkerConfig
from worker.engine.admission import Admission
from worker.engine.cost import CostModel
from worker.engine.scheduler import Scheduler, SchedulerConfig
from worker.engine.step_model import StepBudget, StepModel
from worker.health import Health, PortUnavailable
from worker.levels import make_admission, make_queue, tier_policies
from worker.live_metrics import LiveMetrics
from worker.logs import start_logging
from worker.metrics import Metrics
from worker.model.cpu import num_cpus, prepare_cpu
from worker.model.device import Choice, choose_device
from worker.model.device_runner import DeviceRunner
from worker.model.errors import ModelError
from worker.model.gpu import GpuSettings, free_memory, make_gpu_runner
from worker.model.kv_cache import available_ram, block_bytes, num_blocks_for_ram
from worker.model.loader import LoadedModel, default_cache_dir, load_model
from worker.model.memory import RunnerLimits
from worker.model.runner import TorchRunner
from worker.model.weights import prepare_weights
from worker.prepare import ModelFacts
from worker.snapshots import Snapshots
from worker.supervised import SupervisorLink
from worker.transport.kafka_connections import KafkaUnavailable

log = structlog.get_logger(__name__)

_PROGRESS_STEP = 5  # percent


async def start(config: WorkerConfig, link: SupervisorLink | None = None) -> None:
    """Runs a worker until a signal. Ends the process with status 1 and a sentence when it cannot run.

    link: to the supervisor, if there is one.
    """
    start_logging(config.worker, config.log_level, config.log_format == "json")
    health, snapshots = Health(config.stuck_after), None
    metrics = Metrics(
        config.worker,
        config.tiers,
        config.tenants,
        config.metrics_max_tenants,
        reply_topic("{correlation_id}", config.reply_prefix),
    )
    metrics.restarted(link.num_restarts if link is not None else 0)
    live = LiveMetrics(metrics.registry, health)
    exporting = Exporting("carousel-worker", config.worker)

    def on_ready() -> None:
        print("ready", flush=True)
        if link is not None:
            link.ready()

    try:
        with contextlib.ExitStack() as stack:
            if config.metrics_port is not None:
                # Not everybody pays for it.
                from worker.health_server import page, serving_health
                from worker.live import live_routes, worker_feed

                snapshots = Snapshots(config.worker, config.model, config.tiers, health)
                feed = worker_feed(snapshots, health, asyncio.get_running_loop())
                pages = [page("/metrics", live.render), *live_routes(feed)]
                stack.enter_context(serving_health(health, config.metrics_host, config.metrics_port, pages))
            await check_kafka(config)  # first: a wrong address should not cost the time to load a model
            joined = link.joined if link is not None else lambda group, member: None
            worker = Worker(
                config,
                *build(config, metrics),
                on_ready=on_ready,
                health=health,
                joined=joined,
                metrics=metrics,
                on_serving=live.watch,
                tracer=exporting.tracer,
                snapshots=snapshots,
            )
            _freeze_heap()
            await run_until_signal(worker, link)
    except* (ModelError, KafkaUnavailable, PortUnavailable) as group:
        for error in _leaves(group):
            print(f"carousel worker: {error}", file=sys.stderr)
        if link is not None:
            link.refused()
        raise SystemExit(1) from None
    finally:
        exporting.close()


def _freeze_heap() -> None:
    """Takes what is there to stay out of the collector's sight: torch and transformers alone are 400,000 objects, and
    each full collection would take 0.2 s to look through them again, in which no other Python runs."""
    gc.collect()
    gc.freeze()


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from _leaves(part)
    else:
        yield error


def build(
    config: WorkerConfig, metrics: Metrics | None = None
) -> tuple[ModelFacts, TorchRunner | DeviceRunner, Scheduler, StepModel, Admission]:
    """Loads the model and makes what runs it: (facts, runner, scheduler, step-time model, admission)."""
    num_threads = config.num_threads or num_cpus()
    choice = choose_device(config.device)
    if choice.warning:
        log.warning("device.cpu", reason=choice.warning)
    if choice.is_gpu and config.weights == "int8":
        raise ModelError("--weights int8 is for CPUs: take --dtype bfloat16, or --device cpu")
    prepare_cpu(num_threads, native_kernels=config.native_kernels and not choice.is_gpu)
    limits = RunnerLimits(
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_blocks=config.num_blocks,
        num_host_blocks=config.num_host_blocks,
        device_bytes=free_memory(choice.device) if choice.is_gpu else None,
    )
    loaded = load_model(
        config.model, dtype=config.dtype, kv_dtype=config.kv_dtype, progress=_progress_log(), limits=limits
    )
    try:
        made = _gpu_runner(config, loaded, choice) if choice.is_gpu else _cpu_runner(config, loaded, num_threads)
    except MemoryError as error:
        raise ModelError(
            f"model {loaded.name!r} and its KV cache do not fit into memory ({error}): take fewer --num-blocks, "
            f"--num-host-blocks or --max-num-seqs. Each seat keeps a row of the context, {loaded.max_model_len} tokens"
        ) from error
    runner, num_blocks, num_host_blocks = made
    facts, step_model = model_facts(loaded), StepModel()
    log.info(
        "model.loaded",
        model=loaded.name,
        device=str(choice.device),
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        kv_tokens=num_blocks * config.block_size,
        kv_bytes=num_blocks * config.block_size * loaded.bytes_per_token,
        threads=num_threads,
    )
    queue = make_queue(config, step_model)
    scheduler_config = SchedulerConfig(
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=facts.max_model_len,
        num_host_blocks=num_host_blocks,
        capacity=config.capacity,
        preemption=config.preemption,
        prefix_caching=config.prefix_caching,
        tiers=tier_policies(config),
    )
    cost = _cost_model(runner, step_model, config.max_num_batched_tokens)
    scheduler = Scheduler(scheduler_config, queue, cost, StepBudget(step_model))
    if metrics is not None:
        metrics.model_loaded(
            loaded.name,
            config.block_size * loaded.bytes_per_token,
            lambda: (cost.copy_out_seconds_per_block, cost.copy_in_seconds_per_block),
            lambda num_tokens: cost.prefill_seconds(num_tokens, 0),
        )
    return facts, runner, scheduler, step_model, make_admission(config, step_model, queue, scheduler.load)


def _cpu_runner(config: WorkerConfig, loaded: LoadedModel, num_threads: int) -> tuple[TorchRunner, int, int]:
    """(the runner, its blocks, its host blocks)."""
    _prepare_weights(config, loaded)
    num_blocks = config.num_blocks or num_blocks_for_ram(
        loaded.bytes_per_token,
        config.block_size,
        loaded.max_model_len,
        config.max_num_seqs,
        share=config.kv_memory_share,
    )
    num_host_blocks = config.num_host_blocks
    if num_host_blocks is None:  # both pools are in one memory
        room = int(available_ram() * MAX_KV_SHARE) // block_bytes(loaded.bytes_per_token, config.block_size)
        num_host_blocks = min(num_blocks, max(0, room - num_blocks))
    runner = TorchRunner(
        loaded,
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_threads=num_threads,
        num_host_blocks=num_host_blocks,
    )
    return runner, num_blocks, num_host_blocks


def _gpu_runner(config: WorkerConfig, loaded: LoadedModel, choice: Choice) -> tuple[DeviceRunner, int, int]:
    """As `_cpu_runner`."""
    settings = GpuSettings(
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_blocks=config.num_blocks,
        num_host_blocks=config.num_host_blocks,
        gpu_memory=config.gpu_memory,
        host_memory=config.kv_memory_share,
        graphs=config.cuda_graphs,
        compiled=config.torch_compile,
    )
    with _progress_bar() as report:
        return make_gpu_runner(loaded, choice.device, settings, report)


def _prepare_weights(config: WorkerConfig, loaded: LoadedModel) -> None:
    if config.weights == "plain":
        return
    tuning = default_cache_dir() / "self-tune.json" if config.self_tune else None
    report = _progress_log()
    report("packing the weights for this CPU", 0.0)
    done = prepare_weights(loaded, config.weights, tuning)
    report("the weights are packed", 1.0)
    log.info(
        "weights.prepared",
        weights=config.weights,
        layers=done.num_layers,
        products=done.num_products,
        native=done.num_native,
        norms=done.num_norms,
        mlps=done.num_mlps,
        decoder_layers=done.num_decoder_layers,
        plain=list(done.plain),
        difference=float(f"{done.difference:.2g}"),
        tuned_seconds=round(done.tuned_seconds, 2),
    )


def _cost_model(runner: TorchRunner | DeviceRunner, step_model: StepModel, chunk: int) -> CostModel:
    """Copies as they are measured now, until steps show more; prefills as steps will show."""
    copy_out, copy_in = runner.measure_copies()
    log.info("copies.measured", out_us_per_block=round(copy_out * 1e6, 1), in_us_per_block=round(copy_in * 1e6, 1))
    return CostModel(
        copy_out_seconds_per_block=copy_out,
        copy_in_seconds_per_block=copy_in,
        prefill_seconds=lambda num_tokens, _before: step_model.prefill_seconds(num_tokens, chunk),
        # On a GPU they run beside the step, on streams of their own.
        compute_seconds=step_model.plan_seconds if isinstance(runner, TorchRunner) else None,
    )


def model_facts(loaded: LoadedModel) -> ModelFacts:
    return ModelFacts(loaded.name, loaded.vocab_size, loaded.max_model_len, loaded.eos_token_ids, loaded.tokenizer)


def _progress_log() -> Callable[[str, float], None]:
    """Says what is done, and how far it is in steps of 5 %. Loaders report once per tensor."""
    said: tuple[str, int] | None = None

    def report(what: str, share: float) -> None:
        nonlocal said
        percent = round(share * 100)
        if said is None or said[0] != what or percent >= said[1] + _PROGRESS_STEP:
            said = (what, percent)
            log.info("model.progress", doing=what, percent=percent)

    return report


@contextlib.contextmanager
def _progress_bar() -> Iterator[Callable[[str, float], None]]:
    """A bar for who looks at a terminal, lines of the log for all others."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _progress_log()
        return
    with Progress(console=console, transient=True) as progress:
        tasks: dict[str, TaskID] = {}

        def report(what: str, share: float) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=1.0)
            progress.update(tasks[what], completed=share)

        yield report
