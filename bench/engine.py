"""Ours in process: the worker's engine and runner without Kafka."""

import asyncio
from collections.abc import Callable
from functools import partial

from bench.measure import Answer, Run
from bench.workload import WARM_UP, BenchRequest, Workload
from worker.app import Worker
from worker.config import WorkerConfig
from worker.engine.outputs import SamplingParams, StepOutcome, StepPlan, TokenEvent
from worker.engine.protocols import Runner
from worker.engine.request import Request
from worker.loop import EngineLoop
from worker.prepare import ModelFacts
from worker.start import build


class CountingRunner:
    """A Runner that counts what the steps of another compute and hold."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._num_blocks: dict[int, int] = {}  # seq_id -> blocks held
        self.reset()

    def reset(self) -> None:
        self.num_steps = 0
        self.num_tokens_held = 0  # whose KV is in blocks, summed over the steps
        self.num_blocks_held = 0  # summed over the steps

    def execute(self, plan: StepPlan) -> StepOutcome:
        for seq_id in plan.removed:
            self._num_blocks.pop(seq_id, None)
        for scheduled in plan.scheduled:
            self._num_blocks[scheduled.seq_id] = self._num_blocks.get(scheduled.seq_id, 0) + len(
                scheduled.new_block_ids
            )
        self.num_steps += 1
        self.num_tokens_held += sum(s.start + s.num_tokens for s in plan.scheduled)
        self.num_blocks_held += sum(self._num_blocks.values())
        return self._runner.execute(plan)


def run(
    workload: Workload,
    on_tokens: Callable[[int], None],
    observe: Callable[[Runner], Runner] = lambda runner: runner,
) -> Run:
    """Serves the workload. `observe` may put a runner of its own around the model's."""
    return asyncio.run(_run(workload, on_tokens, observe))


async def _run(workload: Workload, on_tokens: Callable[[int], None], observe: Callable[[Runner], Runner]) -> Run:
    config = WorkerConfig(
        model=workload.model,
        max_num_seqs=workload.max_num_seqs,
        num_threads=workload.num_threads,
        log_level="warning",
        **dict(workload.options),  # type: ignore[arg-type]  # pydantic parses them
    )
    facts, runner, scheduler, step_model, admission = build(config)
    counting = CountingRunner(observe(runner))
    engine = Worker(config, facts, counting, scheduler, step_model, admission).engine  # configured as a worker's is
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(engine.run())
        await _ask(engine, facts, "warm-up", WARM_UP, lambda _: None)
        counting.reset()
        asks = partial(_ask, engine, facts, on_tokens=on_tokens)
        answers = await asyncio.gather(*(asks(str(i), request) for i, request in enumerate(workload.requests)))
        engine.stop()
    return Run(
        answers=tuple(answers),
        num_slot_steps=counting.num_steps * workload.max_num_seqs,
        kv_use=counting.num_tokens_held / (counting.num_blocks_held * config.block_size),
    )


async def _ask(
    engine: EngineLoop, model: ModelFacts, name: str, request: BenchRequest, on_tokens: Callable[[int], None]
) -> Answer:
    loop = asyncio.get_running_loop()
    submitted = loop.time()
    stream = engine.add(
        Request(
            request_id=name,
            prompt_token_ids=request.token_ids,
            sampling=SamplingParams(temperature=0.0),
            max_tokens=request.max_tokens,
            eos_token_ids=model.eos_token_ids,
            stop_token_ids=(),
            stop=(),
            ignore_eos=True,
            n=1,
            lane="standard",
            tenant="bench",
            priority=0,
            arrival=engine.clock.now(),
            deadline=None,
            new_detokenizer=model.tokenizer.new_detokenizer,
        )
    )
    token_ids: list[int] = []
    ttft = 0.0
    while not stream.finished:
        for event in await stream.take():
            if isinstance(event, TokenEvent):
                ttft = ttft or loop.time() - submitted
                token_ids.append(event.token.token_id)
                on_tokens(1)
    return Answer(tuple(token_ids), ttft, loop.time() - submitted)
