"""`carousel worker`: a flag for every setting of WorkerConfig, made from its declaration."""

import asyncio
import inspect
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin

import typer
from pydantic import SecretStr, ValidationError
from pydantic.fields import FieldInfo

from schemas.command_help import Command
from schemas.connection import ENV_PREFIX, KafkaConnection
from worker.config import WorkerConfig
from worker.supervised import SupervisorLink

PANELS = {
    "Model": (
        *("model", "dtype", "kv_dtype", "weights", "self_tune", "native_kernels", "num_threads"),
        *("device", "gpu_memory", "cuda_graphs", "torch_compile"),
    ),
    "Engine": (
        *("max_num_seqs", "max_num_batched_tokens", "block_size", "num_blocks", "num_host_blocks", "kv_memory_share"),
        *("policy", "capacity", "preemption", "prefix_caching"),
    ),
    "Kafka": tuple(KafkaConnection.model_fields),
    "Tiers and tenants": ("quota_burst_seconds",),
    "Life": ("supervisor", "drain_timeout", "stop_grace_period", "stuck_after", "metrics_port", "metrics_host"),
    "Logs": ("step_log", "log_level", "log_format"),
}

KILL_MARGIN_S = 3.0  # before the orchestrator kills, so that the supervisor can still hand over


def worker(**flags: Any) -> None:
    """Serve a model: consume prompts from the lanes, stream the tokens back.

    Prints `ready` when every lane consumes; logs go to stderr. SIGTERM drains: what runs is finished, what does not
    fit in --drain-timeout is resumed by the next owner of its partition, and no caller loses a token. A second SIGTERM
    stops at once. A worker that dies is started again (`ready` is printed again), unless it dies over and over.

    Every setting can also stand in a TOML file (--config) or in the environment (CAROUSEL_MAX_NUM_SEQS=...). Flags win
    over the environment, which wins over the file. Tiers and tenants are tables of the file: `[tiers.NAME]`,
    `[tenants.NAME]`, and `[default_tenant]` for tenants without one. deploy/worker.example.toml shows every key.

    Example: carousel topics create && carousel worker --model smollm2 --max-num-seqs 16
    """
    given = {name: value for name, value in flags.items() if value is not None}
    path = given.get("config")
    if path is not None and not path.is_file():
        _fail(f"--config {path}: no such file")
    try:
        config = WorkerConfig(**given)
    except ValidationError as e:
        _fail(_sentences(e))
    except ValueError as e:  # of the TOML parser
        _fail(f"the configuration file cannot be read: {e}")
    except RecursionError:
        _fail("the configuration file cannot be read: its arrays or tables are nested too deeply")
    if config.supervisor:
        _supervise(config, given)
    link = SupervisorLink.from_environment()
    from worker.start import start  # torch takes seconds to import: not for --help

    try:
        asyncio.run(start(config, link))
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _supervise(config: WorkerConfig, flags: dict[str, Any]) -> NoReturn:
    """Becomes the supervisor of a worker with these flags."""
    from worker.supervisor import Settings, become_supervisor

    try:
        options = config.client_options()
    except ValueError as e:
        _fail(str(e))
    options.pop("ssl_context", None)
    files = config.tls_files()
    settings = Settings(
        kafka=options,
        tls=None if files is None else {name: _plain(value) for name, value in files.items()},
        kill_after=max(config.drain_timeout, config.stop_grace_period - KILL_MARGIN_S),
        json_lines=config.log_format == "json",
    )
    words = [sys.executable, "-m", "worker"]
    for name, value in (flags | {"supervisor": False}).items():
        flag = name.replace("_", "-")
        words.append(f"--{'' if value else 'no-'}{flag}" if isinstance(value, bool) else f"--{flag}={value}")
    become_supervisor(settings, words)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _fail(message: str) -> NoReturn:
    typer.echo(f"carousel worker: {message}", err=True)
    raise SystemExit(2)


def _sentences(error: ValidationError) -> str:
    lines = []
    for fault in error.errors(include_url=False):
        *tables, name = (str(part) for part in fault["loc"] or ("",))
        flag = f"[{'.'.join(tables)}] {name}: " if tables else f"--{name.replace('_', '-')}: " if name else ""
        no_setting = "there is no such setting"
        words = {"missing": "is required", "extra_forbidden": no_setting, "unexpected_keyword_argument": no_setting}
        message = words.get(fault["type"], fault["msg"].removeprefix("Value error, "))
        lines.append(flag + message)
    return "; ".join(lines)


def _with_flags(function: Callable[..., None]) -> Callable[..., None]:
    """Gives a function of **flags the signature that typer makes options of."""
    panels = {name: panel for panel, names in PANELS.items() for name in names}
    parameters = []
    for name, field in WorkerConfig.model_fields.items():
        kind = flag_type(field.annotation)
        if kind is None:
            continue
        flag = name.replace("_", "-")
        option = typer.Option(
            f"--{flag}/--no-{flag}" if kind is bool else f"--{flag}",
            help=f"{field.description}{_default_sentence(field)}",
            show_default=False,
            envvar=None,
            rich_help_panel=panels.get(name, "Lanes and service"),
        )
        parameters.append(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
            )
        )
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {p.name: p.annotation for p in parameters}
    return function


def flag_type(annotation: Any) -> Any:
    """The type of a setting's flag; None: it has none, and is for the TOML file."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, types.UnionType):
        (annotation,) = (a for a in get_args(annotation) if a is not type(None))
    if annotation is SecretStr:
        return str
    return annotation if annotation in (bool, int, float, str, Path) or get_origin(annotation) is Literal else None


def _default_sentence(field: FieldInfo) -> str:
    if field.is_required():
        return " Required."
    if field.default is None or field.default_factory is not None:
        return ""  # the description says what happens
    return f" Default: {field.default}."


command = typer.Typer(add_completion=False, rich_markup_mode="markdown")
command.command(
    cls=Command, help=inspect.getdoc(worker), epilog=f"Environment: {ENV_PREFIX} and the setting's name in capitals."
)(_with_flags(worker))


def main() -> None:
    command(prog_name="carousel worker" if "carousel" in sys.argv[0] else "python -m worker")
