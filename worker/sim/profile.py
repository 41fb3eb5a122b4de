"""What a machine with a model costs: how long a step takes, and how much it holds. Named, or from a TOML file."""

import dataclasses
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from worker.engine.outputs import StepPlan
from worker.sim.files import explain, read_toml

Count = Annotated[int, Field(ge=1)]
Price = Annotated[float, Field(ge=0, le=1e6)]  # seconds
SHORTEST_S = 1e-9  # a decode step; rates stay finite
MAX_BLOCKS = 10_000_000  # the pools keep a few words per block, simulated or not


@dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(strict=True, extra="forbid"))
class Profile:
    """Seconds of a step: base + prefill tokens + context tokens + decodes, each with its price, + blocks swapped.

    Context tokens are the KV that attention reads: of every scheduled sequence, all tokens up to the last it computes.
    The linear form is that of research/engine.md 4.2. Prices are from 0 to 10^6, limits at least 1, else ValueError.
    """

    name: str
    base_s: Price  # reading the weights, launching, sampling
    prefill_s: Price  # per token of a sequence that computes more than one
    context_s: Price  # per token of KV read
    decode_s: Price  # per sequence that computes one token
    swap_s: Price  # per block copied between device and host
    paced_swaps: bool = False  # the scheduler spreads them over steps, as on a CPU
    num_blocks: Annotated[int, Field(ge=1, le=MAX_BLOCKS)]
    num_host_blocks: Annotated[int, Field(ge=0, le=MAX_BLOCKS)] = 0
    block_size: Count = 16  # tokens
    max_num_seqs: Count
    max_num_batched_tokens: Count
    max_model_len: Count

    def __post_init__(self) -> None:
        if self.base_s + self.decode_s < SHORTEST_S:
            raise ValueError(f"base_s and decode_s must be {SHORTEST_S} together at least: a decode step takes time")

    def step_s(self, num_prefill: int, num_context: int, num_decodes: int, num_swapped: int = 0) -> float:
        """Seconds of a step with so many prefill tokens, context tokens, decodes and blocks swapped."""
        return (
            self.base_s
            + self.prefill_s * num_prefill
            + self.context_s * num_context
            + self.decode_s * num_decodes
            + self.swap_s * num_swapped
        )

    def plan_s(self, plan: StepPlan) -> float:
        """Seconds that a plan takes: copies are not hidden behind the forward."""
        num_prefill = num_context = num_decodes = 0
        for part in plan.scheduled:
            num_tokens = part.num_tokens
            num_context += part.start + num_tokens
            if num_tokens == 1:
                num_decodes += 1
            else:
                num_prefill += num_tokens
        return self.step_s(num_prefill, num_context, num_decodes, len(plan.swap_outs) + len(plan.swap_ins))


PROFILES = {
    profile.name: profile
    for profile in (
        # Llama-3.1-8B in bf16 on one H200, computed from data sheets (research/engine.md 3.2 and 5), not measured:
        # weights of 16 GB at 85 % of 4.8 TB/s, and launches; 2 x 8e9 FLOP a token at half of 989 TFLOP/s; 128 KiB of
        # KV a token at 4 TB/s; a block of 2 MiB at 50 GB/s; 105 GB of KV. Host pool: as large again.
        Profile(
            name="h200",
            base_s=5e-3,
            prefill_s=32.5e-6,
            context_s=33e-9,
            decode_s=10e-6,
            swap_s=42e-6,
            num_blocks=50_000,
            num_host_blocks=50_000,
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            max_model_len=32_768,
        ),
        # Llama-2-7B with 4-bit weights and fp16 KV on one A100 of 80 GB, computed from data sheets, not measured. It is
        # the model whose KV the literature counts with: 0.5 MiB a token. 3.9 GB of weights at 85 % of 2.04 TB/s, and
        # launches; 2 x 6.7e9 FLOP a token at half of 312 TFLOP/s; KV at the weights' rate; a block of 8 MiB at 25 GB/s.
        Profile(
            name="a100",
            base_s=3.5e-3,
            prefill_s=86e-6,
            context_s=303e-9,
            decode_s=10e-6,
            swap_s=335e-6,
            num_blocks=8192,
            num_host_blocks=8192,
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            max_model_len=4096,
        ),
        # SmolLM2-135M in float32 on two cores, estimated: 0.54 GB of weights at 18 GB/s, 0.27 GFLOP a token at
        # 70 GFLOP/s, 45 KiB of KV a token (a block: 0.7 MiB) at 10 GB/s.
        Profile(
            name="cpu",
            base_s=30e-3,
            prefill_s=4e-3,
            context_s=4.5e-6,
            decode_s=4e-3,
            swap_s=150e-6,
            paced_swaps=True,
            num_blocks=4096,
            num_host_blocks=4096,
            max_num_seqs=64,
            max_num_batched_tokens=512,
            max_model_len=8192,
        ),
    )
}


def load_profile(name: str) -> Profile:
    """A named profile, or that of a TOML file with Profile's fields as keys.

    In a file, `like = "h200"` takes what is not given from a named one. Raises ValueError or OSError.
    """
    if name in PROFILES:
        return PROFILES[name]
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"profile {name}: neither a file nor one of {', '.join(PROFILES)}")
    try:
        return _read(path)
    except ValidationError as error:
        raise ValueError(f"profile {name}: {explain(error)}") from None
    except ValueError as error:
        raise ValueError(f"profile {name}: {error}") from None


def _read(path: Path) -> Profile:
    given = read_toml(path)
    like = given.pop("like", None)
    if like is not None and like not in list(PROFILES):
        raise ValueError(f"like: must be one of {', '.join(PROFILES)}, got {like!r}")
    start = {} if like is None else dataclasses.asdict(PROFILES[like])
    return Profile(**{**start, "name": path.stem, **given})
