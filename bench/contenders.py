"""The ways to serve the workload. Whoever compares them imports this; torch comes with the one that runs."""

import os
from collections.abc import Callable, Mapping, Sequence
from enum import Enum

from bench.measure import Answer, Difference, Run
from bench.workload import Workload


class Contender(Enum):
    """Its value is its name on the command line and in the JSON file."""

    ENGINE = "engine"
    KAFKA = "kafka"
    STATIC_8 = "static-8"
    STATIC_16 = "static-16"

    @property
    def label(self) -> str:
        return _LABELS[self]

    @property
    def is_static(self) -> bool:
        return self in _BATCH_SIZES


_LABELS = {
    Contender.ENGINE: "ours, in process",
    Contender.KAFKA: "ours, through Kafka",
    Contender.STATIC_8: "transformers, static batches of 8",
    Contender.STATIC_16: "transformers, static batches of 16",
}
_BATCH_SIZES = {Contender.STATIC_8: 8, Contender.STATIC_16: 16}


def serve(contender: Contender, workload: Workload, on_tokens: Callable[[int], None]) -> Run:
    """Runs a contender over the workload, in this process. `on_tokens` hears of output tokens as they come."""
    if contender is Contender.ENGINE:
        from bench import engine

        return engine.run(workload, on_tokens)
    if contender is Contender.KAFKA:
        from bench import through_kafka

        return through_kafka.run(workload, on_tokens)
    # Transformers sets nothing: OpenMP's threads spin then, and it gains where it is alone. Before torch is imported.
    os.environ.pop("OMP_WAIT_POLICY", None)
    from bench import static_batching

    return static_batching.run(workload, on_tokens, _BATCH_SIZES[contender])


def generate_unbatched(
    workload: Workload, requests: Sequence[int], on_tokens: Callable[[int], None]
) -> dict[int, Answer]:
    """What transformers generates for some of the requests, each alone."""
    from bench import static_batching

    return static_batching.generate_unbatched(workload, requests, on_tokens)


def logit_gaps(
    workload: Workload, answers: Mapping[int, Answer], found: Sequence[Difference], on_tokens: Callable[[int], None]
) -> tuple[float, ...]:
    """See `static_batching.logit_gaps`."""
    from bench import static_batching

    return static_batching.logit_gaps(workload, answers, found, on_tokens)
