"""Deterministic in-memory implementations of the engine's seams, for tests and simulations."""

import codecs
from collections.abc import Sequence as Items

from worker.engine.config import SchedulerConfig
from worker.engine.outputs import BlockCopy, NewSequence, SampledToken, ScheduledSequence, StepOutcome, StepPlan

_EMPTY_SLOT = -1
_LOST_SLOT = -2  # where a copy failed


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
        self.min_tokens = new.sampling.min_tokens
        self.end_token_ids = new.end_token_ids
        self.block_ids: list[int] = []
        self.num_computed = 0


class FakeRunner:
    """A runner without a model, and a hostile one: it asserts that every plan keeps the contract of outputs.py.

    Its KV cache holds the token of every slot. A token is sampled from what the block table reads back from there, so a
    block that is lost, overwritten or restored wrongly shows; and it depends on the tokens so far and the choice only,
    so chunking, batching, preemption, sharing and resuming must not change it. Swap-outs read the device as late as the
    contract allows, after the step's computation. A block that is in two tables is never written.
    """

    def __init__(self, config: SchedulerConfig, vocab_size: int = 256) -> None:
        self.vocab_size = vocab_size
        self._config = config
        self._kv = [_EMPTY_SLOT] * (config.num_blocks * config.block_size)
        self._host_kv = [_EMPTY_SLOT] * (config.num_host_blocks * config.block_size)
        self._rows: dict[int, _Row] = {}
        self._num_tables = [0] * config.num_blocks  # by block id
        self._draining: dict[int, None] = {}  # device blocks that this step copies out
        self._lost: dict[int, None] = {}  # device blocks that a copy of this step should have filled
        self._step = 0

    def execute(self, plan: StepPlan) -> StepOutcome:
        """Runs one step. Asserts that the plan is sound."""
        assert plan.step > self._step, f"step {plan.step} after step {self._step}"
        self._step = plan.step
        for seq_id in plan.removed:
            row = self._rows.pop(seq_id, None)  # None: the step that would have opened it failed
            for block_id in row.block_ids if row else ():
                self._num_tables[block_id] -= 1
        for new in plan.new:
            assert new.seq_id not in self._rows, f"sequence {new.seq_id} is not new"
            self._rows[new.seq_id] = _Row(new)
        seq_ids = [part.seq_id for part in plan.scheduled]
        assert seq_ids or plan.all_copies, "an empty step"
        assert len(dict.fromkeys(seq_ids)) == len(seq_ids), "a sequence is scheduled twice"
        assert len(self._rows) <= self._config.max_num_seqs, "more rows than seats"
        assert plan.num_tokens <= self._config.max_num_batched_tokens, "the step is above its budget"
        # All block tables change before anything is computed, as in a real forward.
        for part in plan.scheduled:
            self._grow_table(part)
        failed = self._move_in(plan)
        for part in plan.scheduled:
            self._compute(part)
        tokens = {part.seq_id: SampledToken(self._sample(part.seq_id)) for part in plan.scheduled if part.samples}
        failed += self._move_out(plan)
        return StepOutcome(plan.step, tokens, failed_copies=tuple(failed))

    def next_token(self, token_ids: Items[int], num_prompt_tokens: int, choice: int) -> int:
        """The token after token_ids: a hash of them and the choice (FNV-1a, 32 bit). A test may override it."""
        state = 2166136261 ^ choice
        for token_id in token_ids:
            state = ((state ^ token_id) * 16777619) & 0xFFFFFFFF
        return (state ^ (state >> 15)) % self.vocab_size

    def fails(self, copy: BlockCopy) -> bool:
        """Whether that copy of the step fails. A test may override it."""
        return False

    def _move_in(self, plan: StepPlan) -> list[BlockCopy]:
        """Copy-on-write and swap-ins; returns those that failed."""
        size = self._config.block_size
        self._lost = {}
        self._draining = dict.fromkeys(copy.source for copy in plan.swap_outs)
        being_filled = [copy.target for copy in plan.swap_outs]
        failed: list[BlockCopy] = []
        for pool, copies in ((self._kv, plan.copies), (self._host_kv, plan.swap_ins)):
            for copy in copies:
                self._check_write(copy.target)
                assert pool is self._kv or copy.source not in being_filled, f"host block {copy.source} is being filled"
                source = pool[copy.source * size : (copy.source + 1) * size]
                assert len(source) == size, f"there is no block {copy.source} to copy"
                if self.fails(copy):
                    failed.append(copy)
                    self._lost[copy.target] = None
                    source = [_LOST_SLOT] * size
                self._kv[copy.target * size : (copy.target + 1) * size] = source
        return failed

    def _move_out(self, plan: StepPlan) -> list[BlockCopy]:
        size = self._config.block_size
        failed = [copy for copy in plan.swap_outs if self.fails(copy)]
        for copy in plan.swap_outs:
            assert 0 <= copy.target < self._config.num_host_blocks, f"there is no host block {copy.target}"
            source = self._kv[copy.source * size : (copy.source + 1) * size]
            self._host_kv[copy.target * size : (copy.target + 1) * size] = (
                [_LOST_SLOT] * size if copy in failed else source
            )
        return failed

    def _check_write(self, block_id: int) -> None:
        assert block_id not in self._draining, f"block {block_id} is written while it drains"
        num_tables = self._num_tables[block_id]
        assert num_tables <= 1, f"block {block_id} is in {num_tables} tables and written"

    def _grow_table(self, part: ScheduledSequence) -> None:
        row = self._rows[part.seq_id]
        if not row.block_ids:
            row.num_computed = part.start  # a cached, shared or restored prefix
        for block_id in part.new_block_ids:
            assert 0 <= block_id < self._config.num_blocks, f"there is no block {block_id}"
            assert block_id not in row.block_ids, f"block {block_id} is twice in the table of {part.seq_id}"
            row.block_ids.append(block_id)
            self._num_tables[block_id] += 1
        needed = -(-(part.start + part.num_tokens) // self._config.block_size)
        assert len(row.block_ids) == needed, f"sequence {part.seq_id}: {len(row.block_ids)} blocks, needs {needed}"

    def _compute(self, part: ScheduledSequence) -> None:
        row = self._rows[part.seq_id]
        end = part.start + part.num_tokens
        assert part.start == row.num_computed, f"sequence {part.seq_id} goes on at {part.start}, not {row.num_computed}"
        assert part.num_tokens >= 1, f"sequence {part.seq_id} has no part in the step"
        assert end <= len(row.token_ids), f"sequence {part.seq_id} computes tokens that nobody knows"
        assert part.samples == (end == len(row.token_ids)), f"sequence {part.seq_id} samples at the wrong time"
        self._check_past(part.seq_id, part.start)
        size = self._config.block_size
        for index in range(part.start // size, (end - 1) // size + 1):
            self._check_write(row.block_ids[index])
        for position in range(part.start, end):
            self._kv[self._slot(row, position)] = row.token_ids[position]
        row.num_computed = end

    def _check_past(self, seq_id: int, num_tokens: int) -> bool:
        """Asserts that the KV of its first tokens is what it was; False: a copy of this step failed to bring it."""
        row = self._rows[seq_id]
        if any(block_id in self._lost for block_id in row.block_ids):
            return False
        read = [self._kv[self._slot(row, position)] for position in range(num_tokens)]
        assert read == row.token_ids[:num_tokens], f"the KV cache of sequence {seq_id} is corrupt"
        return True

    def _sample(self, seq_id: int) -> int:
        row = self._rows[seq_id]
        # What is drawn from a KV cache that is not there is nonsense, which the engine must not use.
        is_sound = self._check_past(seq_id, row.num_computed)
        token_id = self.next_token(row.token_ids, row.num_prompt_tokens, row.choice) if is_sound else 0
        if len(row.token_ids) - row.num_prompt_tokens < row.min_tokens:
            while token_id in row.end_token_ids:
                token_id = (token_id + 1) % self.vocab_size
        row.token_ids.append(token_id)
        return token_id

    def _slot(self, row: _Row, position: int) -> int:
        block_size = self._config.block_size
        return row.block_ids[position // block_size] * block_size + position % block_size
