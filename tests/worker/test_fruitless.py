"""A request of which every worker dies ends with an error; what runs beside it does not."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog

from schemas.reasons import FinishReason
from schemas.records import Begin, Cancel, End
from schemas.reply_log import ReplyLog
from tests.worker.world import LANE, World, until
from worker import loop, suspects
from worker.engine.outputs import StepOutcome, StepPlan
from worker.server import RequestServer
from worker.suspects import Suspects
from worker.transport.memory import Fate

POISON = "POISON"


class Death:
    """Makes a worker die of a step that gives a request with such a prompt its next token, once it has `after`."""

    def __init__(self, server: RequestServer, after: int = 0, deadly: Callable[[str], bool] = str.isupper) -> None:
        self.came = False
        self.computed: set[str] = set()  # prompts
        self._prompts: dict[int, str] = {}
        self._after = after
        self._deadly = deadly
        self._execute = server.runner.execute
        server.runner.execute = self._or_die

    def _or_die(self, plan: StepPlan) -> StepOutcome:
        for new in plan.new:
            self._prompts[new.seq_id] = bytes(new.token_ids[: new.num_prompt_tokens]).decode()
        for part in plan.scheduled:
            prompt = self._prompts[part.seq_id]
            self.computed.add(prompt)
            num_tokens = part.start + part.num_tokens - len(prompt)
            if self._deadly(prompt) and part.samples and num_tokens >= self._after:
                self.came = True
                raise RuntimeError("the process is gone")  # the test leaves the worker before anybody hears of it
        return self._execute(plan)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What dies is not tried again for long, turns are taken at once, and no traceback is drawn."""
    monkeypatch.setattr(loop, "RETRY_PAUSES_S", (0.05,))
    monkeypatch.setattr(suspects, "POLL_S", 0.001)
    monkeypatch.setattr(suspects, "SETTLE_S", 0.005)
    with structlog.testing.capture_logs():
        yield


async def life(world: World, name: str = "w", **death: object) -> Death:
    """A worker serves what is open until it dies of something, or everything is answered."""
    async with world.worker(name) as server:
        dying = Death(server, **death)
        world.deliver(server)
        await until(lambda: dying.came or not server.num_calls)
    world.source.lose()
    return dying


async def deaths(world: World, number: int, **death: object) -> None:
    """So many workers die, one after the other."""
    for i in range(number):
        assert (await life(world, f"w{i}", **death)).came


async def calm(**body: object) -> ReplyLog:
    """The answer when nobody dies."""
    world = World()
    world.publish("a", **body)
    async with world.worker() as server:
        await world.serve(server)
    return world.answer("a")


def kinds(world: World, request_id: str = "a") -> list[type]:
    return [type(record) for _, record in world.records(f"replies.{request_id}")]


def most_fruitless(world: World, request_id: str) -> int:
    """The most attempts in a row that ended without a token."""
    log, most = ReplyLog(), 0
    for offset, record in world.records(f"replies.{request_id}"):
        if isinstance(record, Begin):
            most = max(most, len(log.fruitless))
        log.feed(offset, record)
    return most


async def test_a_request_of_which_workers_die_gets_an_error():
    """Four died of it. The fifth does not compute it: an error ends it, it is a dead letter, and it is done."""
    world = World(max_fruitless_attempts=4)
    world.publish("a", prompt=POISON)
    await deaths(world, 4)
    with structlog.testing.capture_logs() as entries:
        async with world.worker("last") as server:
            dying = Death(server)
            await world.serve(server)
            buried = server.metrics.registry.get_sample_value("llm_dlq_records_total", {"reason": "fruitless_attempts"})
    assert dying.computed == set()
    assert kinds(world) == [Begin] * 5 + [End]
    end = world.answer("a").end
    assert (end.attempt, end.finish_reason, end.error.code) == (4, FinishReason.ERROR, "internal")
    assert end.error.message.startswith("4 attempts in a row ended without a token")
    (letter,) = world.broker.topics["prompts.dlq"][0]
    record = world.broker.topics[LANE][0][0]
    assert (letter.key, letter.value) == (record.key, record.value)
    assert dict(letter.headers)["dlq_reason"] == b"fruitless_attempts"
    assert dict(letter.headers)["dlq_message"].decode() == end.error.message
    assert buried == 1
    assert world.source.tracker.position == 1
    (line,) = [entry for entry in entries if entry["event"] == "request.finished"]
    assert (line["outcome"], line["finish_reason"], line["error"]) == ("answered", "error", "internal")


async def test_one_death_less_and_it_is_resumed():
    """Three of four: what they died of has passed, and the answer is that of a calm run."""
    world = World(max_fruitless_attempts=4)
    world.publish("a", prompt=POISON)
    await deaths(world, 3)
    async with world.worker("last") as server:
        await world.serve(server)
    answer, expected = world.answer("a"), await calm(prompt=POISON)
    assert (answer.token_ids, answer.text) == (expected.token_ids, expected.text)
    assert answer.num_begins == 4
    assert world.broker.topics["prompts.dlq"][0] == []


async def test_progress_in_each_attempt_is_never_refused():
    """A bound of one, and a worker that dies after every token: all of them come, none twice."""
    world = World(max_fruitless_attempts=1)
    world.publish("a", prompt=POISON, max_tokens=9)
    for given in range(8):
        async with world.worker(f"w{given}") as server:
            dying = Death(server, after=given + 1)
            world.deliver(server)
            await until(lambda dying=dying: dying.came)
            await until(lambda given=given: len(world.answer("a").token_ids.get(0, ())) > given)
        world.source.lose()
    assert not (await life(world, after=9)).came
    answer, expected = world.answer("a"), await calm(prompt=POISON, max_tokens=9)
    assert (answer.token_ids, answer.end.finish_reason) == (expected.token_ids, FinishReason.LENGTH)
    assert answer.num_begins == 9
    assert answer.num_skipped == answer.num_repeated == 0


async def test_tokens_of_earlier_attempts_stay():
    """Five tokens come, then workers die of the sixth: the error ends after them, and counts them."""
    world = World(max_fruitless_attempts=2)
    world.publish("a", prompt=POISON)
    async with world.worker("w0") as server:
        dying = Death(server, after=5)
        world.deliver(server)
        await until(lambda: dying.came and len(world.answer("a").token_ids.get(0, ())) == 5)
    world.source.lose()
    await deaths(world, 2, after=5)
    await life(world, after=5)
    answer, expected = world.answer("a"), await calm(prompt=POISON)
    assert answer.token_ids == {0: expected.token_ids[0][:5]}
    assert (answer.end.error.code, answer.end.usage.completion_tokens) == ("internal", 5)
    assert answer.num_begins == 4
    assert len(world.broker.topics["prompts.dlq"][0]) == 1


@pytest.mark.parametrize("place", [0, 3, 6])
async def test_what_runs_beside_it_is_answered(place: int):
    """It kills in the first step, and takes with it whatever was resumed together with it: that has no more tokens by
    then than itself, attempt after attempt. Only the one is refused, wherever it stands in the lane."""
    world = World()
    names = [f"innocent{i}" for i in range(6)]
    names.insert(place, POISON)
    for name in names:
        world.publish(name, prompt=name)
    num_lives = 0
    while (await life(world, f"w{num_lives}")).came:
        num_lives += 1
        assert num_lives < 20
    assert num_lives == 10
    for name in names:
        answer = world.answer(name)
        if name == POISON:
            assert answer.end.error.code == "internal"
        else:
            assert answer.token_ids == (await calm(prompt=name)).token_ids
            assert most_fruitless(world, name) <= suspects.TURNS_FROM
    (letter,) = world.broker.topics["prompts.dlq"][0]
    assert dict(letter.headers)["correlation_id"] == POISON.encode()
    assert world.source.tracker.position == 7


async def test_without_a_bound_it_is_tried_for_ever():
    world = World(max_fruitless_attempts=0)
    world.publish("a", prompt=POISON)
    await deaths(world, 15)
    async with world.worker("last") as server:
        await world.serve(server)
    assert world.answer("a").token_ids == (await calm(prompt=POISON)).token_ids


@pytest.mark.parametrize("kind", ["whole", "shared", "shared and whole"])
async def test_what_has_no_count(kind: str):
    """An answer that comes whole has no tokens before its end; on a shared log nobody looks back."""
    world = World(max_fruitless_attempts=2)
    headers = []
    if "shared" in kind:
        world.broker.create("replies.shared")
        headers = [("reply_to", b"replies.shared")]
    world.publish("a", topic="shared" not in kind, headers=headers, prompt=POISON, stream="whole" not in kind)
    await deaths(world, 5)
    async with world.worker("last") as server:
        await world.serve(server)
    log = ReplyLog()
    for offset, record in world.records("replies.shared" if "shared" in kind else "replies.a"):
        log.feed(offset, record)
    assert log.end.finish_reason is FinishReason.LENGTH
    assert world.broker.topics["prompts.dlq"][0] == []


async def test_it_is_a_dead_letter_before_it_ends(monkeypatch: pytest.MonkeyPatch):
    """The DLQ takes it only at the second try, and its `end` waits: who dies in between leaves no answered request
    without a dead letter."""
    monkeypatch.setattr("worker.side_topics.PUBLISH_RETRY_S", 0.001)
    world = World(max_fruitless_attempts=1)
    world.publish("a", prompt=POISON)
    await deaths(world, 1)
    order = []

    def fate(topic: str, headers: list[tuple[str, bytes]]) -> Fate:
        order.append(topic if topic != "replies.a" else dict(headers)["event"].decode())
        return Fate.LOST if order.count("prompts.dlq") == 1 and topic == "prompts.dlq" else Fate.LANDS

    world.broker.fate = fate
    await life(world)
    assert order == ["begin", "prompts.dlq", "prompts.dlq", "end", "usage"]
    assert world.source.tracker.position == 1


async def test_redriven_after_its_end_it_is_done_without_being_computed():
    """The same record on its lane again: its log has an end. At worst one more worker dies of it, which computes while
    its `begin` is on its way; the next knows that somebody was there before."""
    world = World(max_fruitless_attempts=2)
    world.publish("a", prompt=POISON)
    await deaths(world, 2)
    await life(world)
    end = world.answer("a").end
    world.publish("a", topic=False, prompt=POISON)
    await life(world)
    dying = await life(world)
    assert not dying.came
    assert dying.computed == set()
    assert world.source.tracker.position == 2
    assert world.answer("a").end == end
    assert len(world.broker.topics["prompts.dlq"][0]) == len(world.broker.topics["usage"][0]) == 1


async def test_who_waits_for_its_turn_can_be_cancelled():
    """Three have failed three times, and the first never gets a token: a cancel ends the second and a deadline the
    third, at once, without computing them."""
    world = World()
    world.publish("a", prompt=POISON)
    world.publish("b", prompt=POISON)
    world.publish("c", prompt=POISON, headers=[("deadline_ms", b"5000")])
    await deaths(world, 3)
    async with world.worker("last") as server:
        scheduler = server.engine.scheduler
        scheduler.schedule = lambda now: (None, scheduler._expire(now))  # nobody gets a seat
        world.deliver(server)
        await until(lambda: kinds(world) == [Begin] * 4)
        await asyncio.sleep(0.01)
        assert kinds(world, "b") == kinds(world, "c") == [Begin] * 3
        server.cancel(Cancel(b"b"))
        await until(lambda: world.answer("b").ended)
        world.clock.seconds = 6.0
        await until(lambda: world.answer("c").ended)
    assert world.answer("b").end.finish_reason is FinishReason.CANCELLED
    assert world.answer("c").end.finish_reason is FinishReason.DEADLINE
    assert not world.answer("a").ended


async def test_whose_caller_goes_while_it_waits_for_its_turn_is_not_begun():
    """Its topic must not come back (5.10)."""
    world = World()
    for name in ("a", "b"):
        world.publish(name, prompt=POISON)
    await deaths(world, 3)
    async with world.worker("last") as server:
        scheduler = server.engine.scheduler
        scheduler.schedule = lambda now: (None, scheduler._expire(now))  # nobody gets a seat
        world.deliver(server)
        await until(lambda: kinds(world) == [Begin] * 4)
        log = world.broker.topics.pop("replies.b")
        server.cancel(Cancel(b"a"))
        await until(lambda: world.answer("a").ended and not server.num_calls)
    assert "replies.b" not in world.broker.topics
    assert len(log[0]) == 3


def seen(num_fruitless: int) -> ReplyLog:
    return ReplyLog(fruitless=set(range(num_fruitless)))


class Turns:
    """Calls that wait for their turn."""

    def __init__(self, bound: int = 10) -> None:
        self.suspects = Suspects(bound)
        self.begun: list[str] = []
        self._calls: dict[str, Any] = {}

    async def ask(self, tasks: asyncio.TaskGroup, **fruitless: int) -> None:
        """Those that come now, with the attempts that left nothing; until all have had the time to begin."""
        for name, number in fruitless.items():
            tasks.create_task(self._turn(name, number))
        await asyncio.sleep(0.02)

    async def _turn(self, name: str, number: int) -> None:
        self._calls[name] = object()
        await self.suspects.turn(self._calls[name], seen(number), lambda: False)
        self.begun.append(name)

    async def leave(self, name: str) -> None:
        self.suspects.leave(self._calls[name])
        await asyncio.sleep(0.02)


async def test_one_at_a_time_and_the_least_suspicious_first():
    """Who has failed once or twice waits for nobody, and who is to be refused does not either."""
    turns = Turns()
    async with asyncio.TaskGroup() as tasks:
        await turns.ask(tasks, worst=9, fresh=0, bad=5, twice=2, refused=10, good=3, better=3)
        assert turns.begun == ["fresh", "twice", "refused", "good"]
        await turns.leave("bad")  # it has none
        assert turns.begun[4:] == []
        for left, next_one in (("good", "better"), ("better", "bad"), ("bad", "worst")):
            await turns.leave(left)
            assert turns.begun[-1] == next_one


async def test_a_turn_is_over_after_a_while(monkeypatch: pytest.MonkeyPatch):
    """Who waits for a seat holds nobody up for ever."""
    monkeypatch.setattr(suspects, "TURN_S", 0.1)
    turns = Turns()
    async with asyncio.TaskGroup() as tasks:
        await turns.ask(tasks, a=3, b=3)
        assert turns.begun == ["a"]
        await until(lambda: turns.begun == ["a", "b"])


@pytest.mark.parametrize(("bound", "turns_from"), [(1, 1), (2, 1), (3, 1), (4, 2), (6, 3), (10, 3), (1000, 3)])
async def test_turns_begin_well_below_the_bound(bound: int, turns_from: int):
    """So that who runs beside it does not come near the bound with it."""
    turns = Turns(bound)
    async with asyncio.TaskGroup() as tasks:
        await turns.ask(tasks, below_1=turns_from - 1, below_2=turns_from - 1)
        assert turns.begun == ["below_1", "below_2"]
        if turns_from < bound:
            await turns.ask(tasks, at_1=turns_from, at_2=turns_from)
            assert turns.begun[2:] == ["at_1"]
            await turns.leave("at_1")
        fault = turns.suspects.fault(seen(bound + 1))
        assert fault is not None
        assert fault.startswith(f"{bound} attempts in a row")
        assert turns.suspects.fault(seen(bound)) is None
