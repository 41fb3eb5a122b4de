"""Who gives way: which running sequences lose their seat so that a more urgent one gets on.

Rules (research/engine.md 3.3): for a waiting beneficiary only strictly lower classes, for one that cannot grow its own
class, too, but nobody more urgent than itself; never a pinned one, nor one that is about to finish; the lowest class
first, in a class what costs least to bring back; nobody, unless the whole set is enough, and nobody too many.
"""

from collections.abc import Iterable
from typing import Literal

from worker.engine.block_manager import BlockManager
from worker.engine.config import SchedulerConfig
from worker.engine.cost import CostModel
from worker.engine.request import Sequence, SequenceStatus

Cause = Literal["seat", "block"]
Mode = Literal["swap", "recompute"]


class VictimChooser:
    """Chooses victims and how each gives up its KV. Changes nothing."""

    __slots__ = ("_blocks", "_config", "_cost")

    def __init__(self, config: SchedulerConfig, blocks: BlockManager, cost: CostModel | None) -> None:
        self._config = config
        self._blocks = blocks
        self._cost = cost

    def for_waiting(self, seq: Sequence, running: Iterable[Sequence], num_blocks: int, step: int) -> list[Sequence]:
        """Victims for the seat of a waiting sequence; num_blocks: what it lacks. Empty: nobody may, or not enough."""
        candidates = [v for v in running if self._is_lower(v, seq) and self._may_give_way(v, step)]
        return self._cheapest(candidates, max(0, num_blocks))

    def for_growth(self, seq: Sequence, running: Iterable[Sequence], step: int) -> list[Sequence]:
        """Victims for one more block of a running sequence. Empty: seq itself is the last resort."""
        candidates = [
            v
            for v in running
            if (self._is_lower(v, seq) or (v.priority_class == seq.priority_class and _is_behind(v, seq)))
            and self._may_give_way(v, step)
        ]
        return self._cheapest(candidates, 1)

    def waits_for_end(self, seq: Sequence, running: Iterable[Sequence]) -> bool:
        """Whether a less urgent sequence goes on and ends within a few steps: seq had better wait than give way."""
        size = self._blocks.block_size
        return any(
            _is_behind(v, seq)
            and v.has_row
            and v.is_decoding
            and v.num_computed < len(v.block_ids) * size  # it needs no block itself
            and self.ends_soon(v)
            for v in running
        )

    def mode(self, victim: Sequence, cause: Cause, *, contended: bool) -> Mode:
        """How it gives up its KV: the configuration, else the cost model; without one a swap where it is possible.

        Who is displaced on the way in has its copy still, so there is nothing to choose.
        """
        if victim.num_saved:
            return "swap"
        forced = self._config.preemption
        if forced == "recompute" or not self._blocks.can_swap_out(victim):
            return "recompute"
        if forced == "swap" or self._cost is None:
            return "swap"
        num_blocks = self._blocks.device.blocks_for(victim.num_computed)
        num_hits = min(self._expected_hits(victim, cause), victim.num_computed)
        swap = self._cost.prefers_swap(victim.num_computed, num_blocks, num_hits, contended=contended)
        return "swap" if swap else "recompute"

    def _expected_hits(self, victim: Sequence, cause: Cause) -> int:
        """Tokens that the prefix cache will give back.

        Blocks in other tables survive. When only a seat was scarce, so do all others that can be found; when blocks
        were, those are reused soon.
        """
        device = self._blocks.device
        num_hits = 0
        for block_id in victim.block_ids:
            survives = device.num_references(block_id) > 1 or (cause == "seat" and block_id in device.prefixes)
            if not survives:
                break
            num_hits += self._blocks.block_size
        return num_hits

    def _is_lower(self, victim: Sequence, seq: Sequence) -> bool:
        """Strictly: an order among equals would make two of them displace each other in turn."""
        return victim.priority_class < seq.priority_class

    def _may_give_way(self, victim: Sequence, step: int) -> bool:
        return (
            victim.status is SequenceStatus.RUNNING
            and (victim.has_row or victim.num_saved > 0)
            and victim.opened_step != step
            and not self.ends_soon(victim)
            and not self._blocks.is_pinned(victim)
        )

    def ends_soon(self, seq: Sequence) -> bool:
        """Whether its seat and its blocks come free within a few steps anyway."""
        return seq.request.max_tokens - len(seq.output) <= self._config.finish_soon

    def _cheapest(self, candidates: list[Sequence], num_blocks: int) -> list[Sequence]:
        """The cheapest candidates that free num_blocks blocks and a seat, or none at all."""
        candidates.sort(key=self._score)
        tally = _Tally(self._blocks)
        chosen: list[Sequence] = []
        for victim in candidates:
            chosen.append(victim)
            tally.add(victim)
            if tally.num_freed >= num_blocks:
                break
        if not chosen or tally.num_freed < num_blocks:
            return []
        for victim in chosen[:-1]:  # what a later, larger one made needless
            tally.remove(victim)
            if tally.num_freed >= num_blocks:
                chosen.remove(victim)
            else:
                tally.add(victim)
        return chosen

    def _score(self, victim: Sequence) -> tuple[int, float, int]:
        """Smallest goes first: the class, then what bringing it back costs, the more so the less is to come of it.

        Least cost first wastes less than the newest first or than most blocks first (vLLM #54644, #56897). Without a
        model the cost is the computed tokens. Of equals the newest goes.
        """
        cost = float(victim.num_computed) if self._cost is None else self._cheaper_seconds(victim)
        to_come = 1.0 - len(victim.output) / victim.request.max_tokens
        return victim.priority_class, cost / to_come, -victim.seq_id

    def _cheaper_seconds(self, victim: Sequence) -> float:
        assert self._cost is not None
        recompute = self._cost.recompute_seconds(victim.num_computed, 0)
        if not self._blocks.can_swap_out(victim):
            return recompute
        return min(recompute, self._cost.swap_seconds(len(victim.block_ids)))


def _is_behind(other: Sequence, seq: Sequence) -> bool:
    return (other.urgency, other.seq_id) > (seq.urgency, seq.seq_id)


class _Tally:
    """How many blocks come free when some sequences go: those that no other table has, and those owed to them."""

    __slots__ = ("_device", "_left", "num_freed")

    def __init__(self, blocks: BlockManager) -> None:
        self._device = blocks.device
        self._left: dict[int, int] = {}  # references that would be left
        self.num_freed = 0

    def add(self, victim: Sequence) -> None:
        left, references = self._left, self._device.num_references
        self.num_freed += max(0, victim.num_target_blocks - len(victim.block_ids))
        for block_id in victim.block_ids:
            left[block_id] = left.get(block_id, references(block_id)) - 1
            self.num_freed += left[block_id] == 0

    def remove(self, victim: Sequence) -> None:
        self.num_freed -= max(0, victim.num_target_blocks - len(victim.block_ids))
        for block_id in victim.block_ids:
            self.num_freed -= self._left[block_id] == 0
            self._left[block_id] += 1
