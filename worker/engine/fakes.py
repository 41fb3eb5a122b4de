"""Deterministic in-memory implementations of the engine's seams, for tests and simulations."""

import codecs
from collections.abc import Sequence as Items

from worker.engine.outputs import NewSequence, SampledToken, ScheduledSequence, StepOutcome, StepPlan
from worker.engine.scheduler import SchedulerConfig

_EMPTY_SLOT = -1


class VirtualClock:
    """A clock that a test moves."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, "a clock never goes back"
        self._now += seconds


class ByteDetokenizer:
    """Tokens 0 to 255 are the bytes of UTF-8 text; all others are special and give no text."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        return self._decoder.decode(bytes((token_id,))) if token_id < 256 else ""

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _Row:
    """What the runner knows of one sequence."""

    def __init__(self, new: NewSequence) -> None:
        self.token_ids = list(new.token_ids)
        self.num_prompt_tokens = new.num_prompt_tokens
        self.choice = new.choice
        self.block_ids: list[int] = []
        self.num_computed = 0


class FakeRunner:
    """A runner without a model, and a hostile one: it asserts that every plan keeps the contract of outputs.py.

    Its KV cache holds the token of every slot. A token is sampled from what the block table reads back from there, so a
    block that is shared, lost or overwritten shows; and it depends on the tokens so far and the choice only, so
    chunking, batching, preemption and resuming must not change it.
    """

    def __init__(self, config: SchedulerConfig, vocab_size: int = 256) -> None:
        self.vocab_size = vocab_size
        self._config = config
        self._kv = [_EMPTY_SLOT] * (config.num_blocks * config.block_size)
        self._rows: dict[int, _Row] = {}
        self._owners: dict[int, int] = {}  # block id -> seq_id
        self._step = 0

    def execute(self, plan: StepPlan) -> StepOutcome:
        """Runs one step. Asserts that the plan is sound."""
        assert plan.step > self._step, f"step {plan.step} after step {self._step}"
        self._step = plan.step
        for seq_id in plan.removed:
            row = self._rows.pop(seq_id, None)  # None: the step that would have opened it failed
            for block_id in row.block_ids if row else ():
                del self._owners[block_id]
        for new in plan.new:
            assert new.seq_id not in self._rows, f"sequence {new.seq_id} is not new"
            self._rows[new.seq_id] = _Row(new)
        seq_ids = [part.seq_id for part in plan.scheduled]
        assert seq_ids, "an empty step"
        assert len(dict.fromkeys(seq_ids)) == len(seq_ids), "a sequence is scheduled twice"
        assert len(self._rows) <= self._config.max_num_seqs, "more rows than seats"
        assert plan.num_tokens <= self._config.max_num_batched_tokens, "the step is above its budget"
        # All block tables change before anything is computed, as in a real forward.
        for part in plan.scheduled:
            self._grow_table(part)
        for part in plan.scheduled:
            self._compute(part)
        tokens = {part.seq_id: SampledToken(self._sample(part.seq_id)) for part in plan.scheduled if part.samples}
        return StepOutcome(plan.step, tokens)

    def next_token(self, token_ids: Items[int], num_prompt_tokens: int, choice: int) -> int:
        """The token after token_ids: a hash of them and the choice (FNV-1a, 32 bit). A test may override it."""
        state = 2166136261 ^ choice
        for token_id in token_ids:
            state = ((state ^ token_id) * 16777619) & 0xFFFFFFFF
        return (state ^ (state >> 15)) % self.vocab_size

    def _grow_table(self, part: ScheduledSequence) -> None:
        row = self._rows[part.seq_id]
        for block_id in part.new_block_ids:
            assert 0 <= block_id < self._config.num_blocks, f"there is no block {block_id}"
            owner = self._owners.setdefault(block_id, part.seq_id)
            assert owner == part.seq_id, f"block {block_id} is in the tables of {owner} and {part.seq_id}"
            assert block_id not in row.block_ids, f"block {block_id} is twice in the table of {part.seq_id}"
            row.block_ids.append(block_id)
        needed = -(-(part.start + part.num_tokens) // self._config.block_size)
        assert len(row.block_ids) == needed, f"sequence {part.seq_id}: {len(row.block_ids)} blocks, needs {needed}"

    def _compute(self, part: ScheduledSequence) -> None:
        row = self._rows[part.seq_id]
        end = part.start + part.num_tokens
        assert part.start == row.num_computed, f"sequence {part.seq_id} goes on at {part.start}, not {row.num_computed}"
        assert part.num_tokens >= 1, f"sequence {part.seq_id} has no part in the step"
        assert end <= len(row.token_ids), f"sequence {part.seq_id} computes tokens that nobody knows"
        assert part.samples == (end == len(row.token_ids)), f"sequence {part.seq_id} samples at the wrong time"
        for position in range(part.start, end):
            self._kv[self._slot(row, position)] = row.token_ids[position]
        row.num_computed = end

    def _sample(self, seq_id: int) -> int:
        row = self._rows[seq_id]
        read = [self._kv[self._slot(row, position)] for position in range(row.num_computed)]
        assert read == row.token_ids, f"the KV cache of sequence {seq_id} is corrupt"
        token_id = self.next_token(read, row.num_prompt_tokens, row.choice)
        row.token_ids.append(token_id)
        return token_id

    def _slot(self, row: _Row, position: int) -> int:
        block_size = self._config.block_size
        return row.block_ids[position // block_size] * block_size + position % block_size
