"""Makes the snapshots that the live page shows: of the engine, at its rim, on the event loop, and only when asked.

What a step costs without a viewer: one append and three sums. The engine knows nothing of this.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Mapping

from schemas.records import End
from schemas.snapshot import Lane, Latency, Pool, Preempted, Seat, Snapshot, Step
from schemas.topics import Tier
from worker.engine.outputs import StepRecord
from worker.engine.request import Sequence, SequenceStatus
from worker.health import Health

MAX_STEPS = 60  # a page that looks on remembers more
MAX_PREEMPTED = 24
MAX_REQUESTS = 256  # per tier, for its latencies
_DIGITS = bytes(range(48, 58)) + bytes(246)  # block state -> its character


class Snapshots:
    """Remembers the last steps and latencies. All of it runs on the event loop, `encode` of a snapshot anywhere."""

    def __init__(self, worker: str, model: str, tiers: Mapping[str, Tier], health: Health) -> None:
        self._worker = worker
        self._model = model
        self._tiers = tiers
        self._health = health
        self._steps: deque[Step] = deque(maxlen=MAX_STEPS)
        self._preempted: deque[Preempted] = deque(maxlen=MAX_PREEMPTED)
        self._paused: tuple[str, ...] = ()
        self._num_steps = self._num_decode_tokens = self._num_prefill_tokens = 0
        self._latencies = {name: _Latencies(tier) for name, tier in tiers.items()}
        self._places = _Places()
        self.num_taken = 0

    def observe(self, record: StepRecord) -> None:
        """A step has ended, now."""
        self._paused = record.paused
        self._num_steps += 1
        self._num_decode_tokens += record.num_decode_tokens
        self._num_prefill_tokens += record.num_prefill_tokens
        self._steps.append(
            Step(
                step=record.step,
                at=round(record.at, 3),
                duration_ms=round((time.monotonic() - record.at) * 1000, 2),
                num_running=record.num_running,
                num_waiting=record.num_waiting,
                num_decode_tokens=record.num_decode_tokens,
                num_prefill_tokens=record.num_prefill_tokens,
                num_blocks_used=record.num_blocks_used,
                num_preempted=len(record.preempted),
            )
        )
        for each in record.preempted:
            self._preempted.append(
                Preempted(
                    step=record.step,
                    at=round(record.at, 3),
                    request=_correlation_id(each.request_id),
                    choice=each.choice,
                    cause=each.cause,
                    mode=each.mode,
                    num_tokens=each.num_tokens,
                    beneficiary=_correlation_id(each.beneficiary),
                )
            )

    def finished(self, tier: str, end: End, tpot: float | None) -> None:
        """A request of that tier is over. tpot: seconds per output token, if it has one."""
        if end.timing is not None and end.timing.ttft_ms is not None:
            self._latencies[tier].add(end.timing.ttft_ms, None if tpot is None else tpot * 1000)

    def take(self) -> Snapshot | None:
        """The worker as it is; None while there is no engine."""
        engine = self._health.engine
        if engine is None:
            return None
        self.num_taken += 1
        scheduler = engine.scheduler
        stats, (device, host), now = scheduler.stats(), scheduler.block_states(), engine.clock.now()
        seated, waiting = scheduler.seated, scheduler.waiting_by_lane()
        self._places.update(seated)
        paused = frozenset(self._paused)
        seats_by_lane = Counter(seq.request.lane for seq in seated)
        block_size = scheduler.config.block_size
        return Snapshot(
            number=self.num_taken,
            worker=self._worker,
            model=self._model,
            clock_s=round(now, 3),
            reasons=tuple(self._health.not_ready()),
            loop_lag_ms=round(self._health.monitor.lag * 1000, 1),
            num_seats=scheduler.config.max_seats,
            num_swaps=stats.total_swaps,
            num_recomputes=stats.total_recomputes,
            seats=tuple(self._seat(seq, seq.request.request_id in paused) for seq in seated),
            lanes=tuple(self._lane(tier, seats_by_lane[tier], waiting.get(tier), now) for tier in self._tiers),
            latencies=tuple(latencies.summary for latencies in self._latencies.values()),
            steps=tuple(self._steps),
            preempted=tuple(self._preempted),
            device=Pool(block_size, device.translate(_DIGITS).decode()),
            host=Pool(block_size, host.translate(_DIGITS).decode()),
            num_steps=self._num_steps,
            num_decode_tokens=self._num_decode_tokens,
            num_prefill_tokens=self._num_prefill_tokens,
        )

    def _seat(self, seq: Sequence, paused: bool) -> Seat:
        request = seq.request
        if seq.status is SequenceStatus.LEAVING:
            state = "leaving"
        elif paused:
            state = "paused"
        else:
            state = "decode" if seq.is_decoding else "prefill"
        return Seat(  # in the order of its fields: with their names it would take half as long again
            self._places[seq],
            _correlation_id(request.request_id),
            seq.choice,
            request.lane,
            request.tenant,
            state,
            seq.num_prompt,
            seq.num_computed,
            len(seq.output),
            request.max_tokens,
            len(seq.block_ids),
            seq.num_preemptions,
        )

    def _lane(self, tier: str, num_seated: int, waiting: tuple[int, float] | None, now: float) -> Lane:
        num_waiting, arrival = waiting or (0, now)
        lane = self._health.lanes.get(tier)
        return Lane(
            tier=tier,
            num_seated=num_seated,
            num_waiting=num_waiting,
            oldest_age_s=round(max(0.0, now - arrival), 2) if num_waiting else None,
            num_outstanding=0 if lane is None else lane.num_outstanding,
            num_unread=0 if lane is None else sum(lane.lags().values()),
        )


class _Places:
    """Who sits where: the engine has seats, but no places."""

    def __init__(self) -> None:
        self._taken: dict[int, int] = {}  # sequence number -> place

    def update(self, seated: tuple[Sequence, ...]) -> None:
        """Whoever still sits keeps the place, newcomers take the first free ones."""
        self._taken = {seq.seq_id: self._taken[seq.seq_id] for seq in seated if seq.seq_id in self._taken}
        used = set(self._taken.values())
        free = (place for place in range(len(seated)) if place not in used)
        for seq in seated:
            if seq.seq_id not in self._taken:
                self._taken[seq.seq_id] = next(free)

    def __getitem__(self, seq: Sequence) -> int:
        return self._taken[seq.seq_id]


class _Latencies:
    """The last requests of one tier."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._times: deque[tuple[float, float | None]] = deque(maxlen=MAX_REQUESTS)  # (ttft, tpot) in ms
        self._summary: Latency | None = None

    def add(self, ttft: float, tpot: float | None) -> None:
        self._times.append((ttft, tpot))
        self._summary = None

    @property
    def summary(self) -> Latency:
        if self._summary is None:
            self._summary = self._summarise()
        return self._summary

    def _summarise(self) -> Latency:
        tier, times = self._tier, self._times
        ttfts, tpots = sorted(ttft for ttft, _ in times), sorted(tpot for _, tpot in times if tpot is not None)
        met = [
            (tier.ttft_ms is None or ttft <= tier.ttft_ms)
            and (tier.tpot_ms is None or tpot is None or tpot <= tier.tpot_ms)
            for ttft, tpot in times
        ]
        has_targets = tier.ttft_ms is not None or tier.tpot_ms is not None
        return Latency(
            tier=tier.name,
            num_requests=len(times),
            ttft_p50_ms=_percentile(ttfts, 50),
            ttft_p95_ms=_percentile(ttfts, 95),
            ttft_target_ms=tier.ttft_ms,
            tpot_p50_ms=_percentile(tpots, 50),
            tpot_p95_ms=_percentile(tpots, 95),
            tpot_target_ms=tier.tpot_ms,
            attained=round(sum(met) / len(met), 4) if met and has_targets else None,
        )


def _percentile(ordered: list[float], percent: int) -> float | None:
    """Nearest rank."""
    return round(ordered[math.ceil(len(ordered) * percent / 100) - 1], 2) if ordered else None


def _correlation_id(engine_id: str) -> str:
    """The server numbers the engine requests of a correlation id."""
    return engine_id.rpartition("#")[0] or engine_id
