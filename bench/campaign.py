"""A bounded campaign of faults against workers on Apache Kafka, under load, with a verdict at the end.

The seed decides which requests are made and which faults strike in which order; when exactly they strike is the
machine's. So a seed replays a campaign, not an interleaving.
"""

import asyncio
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from bench import judge
from bench.beside import prefer
from bench.fleet import Fleet, Member, WorkerDied
from bench.judge import Verdict
from bench.traffic import LANES, NUM_KINDS, Kind, Sent, Traffic, kinds
from schemas.connection import KafkaConnection
from service.client import Client
from service.errors import BrokerUnavailable, ServiceError
from service.topics import create_topics

SESSION_TIMEOUT_S = 6.0
PARTITIONS = 4
IN_FLIGHT_BY_CLIENT = 0.1  # share of the load that goes through the product's client
WARM_UP_S = 2.0  # of load before the first fault
SETTLE_S = 180.0  # without any progress: what has not ended then is lost
SHARED_TOPICS = ("replies.shared-a", "replies.shared-b")


class Fault(Enum):
    """What can strike."""

    KILL = "kill -9"
    FREEZE = "SIGSTOP for twice the session time"
    TERM = "SIGTERM"
    ADD = "worker added"
    REMOVE = "worker removed"
    BROKER = "broker restart"
    LEADER = "leader move"
    SLOW = "slow reply"
    CANCEL = "cancelled requests"
    EXPIRE = "expired requests"


WEIGHTS = {
    Fault.KILL: 4,
    Fault.FREEZE: 2,
    Fault.TERM: 3,
    Fault.ADD: 2,
    Fault.REMOVE: 2,
    Fault.BROKER: 1,
    Fault.LEADER: 2,
    Fault.SLOW: 2,
    Fault.CANCEL: 3,
    Fault.EXPIRE: 3,
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to happen. `calm`: each fault waits until what the last one hit runs again."""

    seed: int
    num_faults: int
    nodes: int = 1
    workers: int = 3
    in_flight: int = 200
    faults: tuple[Fault, ...] = tuple(Fault)
    calm: bool = False
    supervisor: bool = True
    shared: bool = False  # every request is answered on a shared reply topic
    num_kinds: int = NUM_KINDS

    def strikes(self) -> list[tuple[Fault, float]]:
        """The faults in their order, each with the seconds since the last one."""
        rng, workers, drawn = random.Random(self.seed), self.workers, []  # the workers wanted: one less to one more
        for _ in range(self.num_faults):
            ruled_out = {
                Fault.LEADER: self.nodes == 1,
                Fault.ADD: workers > self.workers,
                Fault.REMOVE: workers < self.workers,
            }
            weights = {f: w for f, w in WEIGHTS.items() if f in self.faults and not ruled_out.get(f)}
            fault = rng.choices(list(weights), weights=list(weights.values()))[0]
            workers += (fault is Fault.ADD) - (fault is Fault.REMOVE)
            drawn.append((fault, rng.uniform(0.5, 3.0)))
        return drawn

    @property
    def replay(self) -> str:
        """The command that runs this campaign."""
        words = [f"--seed {self.seed}", f"--faults {self.num_faults}", f"--nodes {self.nodes}"]
        words += [f"--workers {self.workers}", f"--in-flight {self.in_flight}"]
        if self.faults != tuple(Fault):
            words.append(f"--only {','.join(fault.name.lower() for fault in self.faults)}")
        words += ["--calm"] * self.calm + ["--no-supervisor"] * (not self.supervisor)
        words += ["--shared"] * self.shared
        return "python -m bench.faults " + " ".join(words)


@dataclass(slots=True)
class HandOver:
    """A kill, and the requests that the dead worker had running: when each got its next token."""

    at: float  # monotonic
    running: list[tuple[Sent, int]]  # with the attempt that died

    def seconds(self) -> list[float]:
        """From the kill to each first token of a later attempt."""
        found = []
        for sent, attempt in self.running:
            later = [at for at, by in sent.tokens_at if at > self.at and by > attempt]
            if later:
                found.append(later[0] - self.at)
        return found


@dataclass(slots=True)
class Report:
    """What came of it."""

    plan: Plan
    verdict: Verdict = field(default_factory=Verdict)
    struck: list[Fault] = field(default_factory=list)
    hand_overs: list[HandOver] = field(default_factory=list)
    seconds: float = 0.0
    folder: str = ""

    def first_tokens(self) -> list[float]:
        """Per kill that hit a running request, seconds to the first resumed token."""
        return [min(times) for h in self.hand_overs if (times := h.seconds())]

    def all_tokens(self) -> list[float]:
        """Per request that a kill interrupted, seconds to its next token."""
        return [t for h in self.hand_overs for t in h.seconds()]

    def to_fields(self) -> dict[str, Any]:
        return {
            "seed": self.plan.seed,
            "nodes": self.plan.nodes,
            "workers": self.plan.workers,
            "in_flight": self.plan.in_flight,
            "supervisor": self.plan.supervisor,
            "shared": self.plan.shared,
            "replay": self.plan.replay,
            "seconds": round(self.seconds, 1),
            "struck": [fault.value for fault in self.struck],
            "kill_to_first_resumed_token_s": _spread(self.first_tokens()),
            "kill_to_next_token_of_each_s": _spread(self.all_tokens()),
            **self.verdict.to_fields(),
        }


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"n": len(values), "median": round(statistics.median(values), 2), "worst": round(max(values), 2)}


class Campaign:
    """Runs a plan on a cluster that it starts. `said` hears what happens, in words."""

    def __init__(self, plan: Plan, cluster: Any, reader: Any, said: Callable[[str], None]) -> None:
        self._plan = plan
        self._cluster = cluster
        self._reader = reader
        self._said = said
        self._rng = random.Random(f"{plan.seed}: where they strike")
        self._kinds = kinds(plan.seed, plan.num_kinds, shared=plan.shared)
        self._connection = KafkaConnection(bootstrap=cluster.bootstrap)
        self._broker_fault = asyncio.Lock()  # one at a time
        self._adding = asyncio.Lock()
        self._running: list[asyncio.Task[None]] = []
        self._completions: list[tuple[Kind, list[list[int]]]] = []  # of the product's client
        self._fleet: Fleet
        self._traffic: Traffic
        self.report = Report(plan)

    async def run(self) -> Report:
        folder = Path(tempfile.mkdtemp(prefix="carousel-faults-"))
        self.report.folder = str(folder)
        arguments = ["--model", "tiny", "--num-threads", "1", "--max-num-seqs", "32", "--num-blocks", "1024"]
        arguments += ["--session-timeout-ms", str(round(SESSION_TIMEOUT_S * 1000)), "--drain-timeout", "3"]
        arguments += ["--no-supervisor"] * (not self._plan.supervisor)
        self._fleet = Fleet(self._cluster.bootstrap, folder, arguments)
        await create_topics(self._connection, partitions=PARTITIONS)
        began = time.monotonic()
        try:
            async with Traffic(
                self._connection,
                self._kinds,
                random.Random(f"{self._plan.seed}: requests"),
                new_stream=self._reader.Stream,
                decode=self._reader.decode,
                shared_topics=SHARED_TOPICS,
            ) as self._traffic:
                await self._wait_for_members(self._plan.workers)
                expected = await self._undisturbed()
                await self._under_fire()
                await self._judge(expected)
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
            await self._fleet.close()
            self.report.seconds = time.monotonic() - began
            for node in self._cluster.nodes:
                shutil.copy(node.log, folder)
        return self.report

    # The calm before

    async def _wait_for_members(self, number: int) -> None:
        while len(self._fleet.staying()) < number:
            await self._fleet.add()
        for member in self._fleet.staying():
            await self._fleet.ready(member)

    async def _undisturbed(self) -> dict[int, judge.Answer]:
        self._said("an undisturbed run of every kind of request")
        sent = await self._traffic.publish(self._kinds)
        await self._until_ended(sent)
        return judge.expected_answers(self._kinds, sent)

    async def _until_ended(self, sent: Sequence[Sent]) -> None:
        """Returns when all have ended, or nothing has come for SETTLE_S."""
        last, since = -1, time.monotonic()
        while not all(s.over for s in sent):
            progress = sum(len(s.stream.headers) for s in sent)
            if progress != last:
                last, since = progress, time.monotonic()
            elif time.monotonic() - since > SETTLE_S:
                return
            await asyncio.sleep(0.2)

    # Under fire

    async def _under_fire(self) -> None:
        over = asyncio.Event()
        by_client = round(self._plan.in_flight * IN_FLIGHT_BY_CLIENT)
        load = asyncio.create_task(self._traffic.keep(self._plan.in_flight - by_client, over), name="load")
        clients = asyncio.create_task(self._call(by_client, over), name="clients")
        try:
            await asyncio.sleep(WARM_UP_S)
            for number, (fault, gap) in enumerate(self._plan.strikes(), 1):
                await asyncio.sleep(gap)
                while len(self._running) >= 2 * self._plan.workers:  # a busy machine: what struck is at work still
                    await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
                    self._settle()
                self._said(f"fault {number} of {self._plan.num_faults}: {fault.value}, {len(self._traffic.open)} open")
                await self._strike(fault)
                self._settle()
                for failed in (t for t in (load, clients) if t.done()):
                    failed.result()
            await asyncio.gather(*self._running)
            await self._restore()
        finally:
            over.set()
            await load
        self._said(f"the last {len(self._traffic.open)} requests")
        await self._until_ended(self._traffic.sent)
        await clients

    async def _strike(self, fault: Fault) -> None:
        self.report.struck.append(fault)
        actions: dict[Fault, Callable[[], Awaitable[None]]] = {
            Fault.KILL: self._kill,
            Fault.FREEZE: self._freeze,
            Fault.TERM: self._term,
            Fault.ADD: self._add,
            Fault.REMOVE: self._remove,
            Fault.BROKER: self._restart_broker,
            Fault.LEADER: self._move_leaders,
            Fault.SLOW: self._slow_replies,
            Fault.CANCEL: self._cancel,
            Fault.EXPIRE: self._expire,
        }
        await self._replace_the_dead()
        task = asyncio.create_task(actions[fault](), name=fault.value)  # type: ignore[arg-type]
        self._running.append(task)
        if self._plan.calm:
            await task
            await self._wait_for_members(self._plan.workers)
            await self._until_resumed()

    def _settle(self) -> None:
        """Takes out the faults that are over. Raises what one of them has raised."""
        for over in [t for t in self._running if t.done()]:
            self._running.remove(over)
            over.result()

    async def _someone(self) -> Member:
        """An idle worker, as the seed would have it; waits until no more than one is missing."""
        while len(idle := self._fleet.idle()) < max(1, self._plan.workers - 1):
            await self._replace_the_dead()
            await asyncio.sleep(0.1)
        return idle[self._rng.randrange(len(idle))]

    async def _replace_the_dead(self) -> None:
        """One less than wanted is a fault's work; who is missing beyond that has died at its start, say."""
        async with self._adding:
            self._fleet.bury()
            while len(self._fleet.staying()) < self._plan.workers - 1:
                await self._fleet.add()

    async def _kill(self) -> None:
        member = await self._someone()
        running = [(s, s.stream.attempt) for s in self._traffic.open if s.worker == member.name]
        self.report.hand_overs.append(HandOver(time.monotonic(), running))
        restarts = await self._fleet.kill(member)
        if not restarts:
            self._fleet.bury()
            await self._fleet.add()

    async def _freeze(self) -> None:
        await self._fleet.freeze(await self._someone(), 2 * SESSION_TIMEOUT_S)

    async def _term(self) -> None:
        member = await self._someone()
        status = await self._fleet.drain(member)
        if status != 0:
            self.report.verdict.add("workers that died by themselves", self._fleet.epitaph(member))
        self._fleet.bury()
        await self._fleet.add()

    async def _add(self) -> None:
        await self._fleet.add()

    async def _remove(self) -> None:
        member = await self._someone()
        if await self._fleet.drain(member) != 0:
            self.report.verdict.add("workers that died by themselves", self._fleet.epitaph(member))
        self._fleet.bury()

    async def _restart_broker(self) -> None:
        async with self._broker_fault:
            node = self._rng.choice(self._cluster.nodes)
            if self._rng.random() < 0.3:
                node.kill()
            else:
                await asyncio.to_thread(node.stop)
            await asyncio.sleep(self._rng.uniform(0, 4))
            node.start(wait=False)  # here: the broker ends with the thread that starts it
            prefer(self._cluster)
            await asyncio.to_thread(node.wait)
            await self._traffic.until_served()

    async def _slow_replies(self) -> None:
        async with self._broker_fault:
            node = self._rng.choice(self._cluster.nodes)
            node.freeze()
            try:
                await asyncio.sleep(self._rng.uniform(0.5, 2.5))
            finally:
                node.thaw()
            await self._traffic.until_served()

    async def _move_leaders(self) -> None:
        """Another preferred leader for every partition of lanes and groups, and an election."""
        async with self._broker_fault:
            ids = [node.index for node in self._cluster.nodes]
            names = [(f"prompts.{lane}", PARTITIONS) for lane in LANES] + [("__consumer_offsets", 3)]
            names += [(s.topic, 1) for s in self._traffic.open[:40] if not s.kind.shared]
            partitions = [
                {"topic": topic, "partition": p, "replicas": self._rng.sample(ids, len(ids))}
                for topic, count in names
                for p in range(count)
            ]
            file = Path(self.report.folder, "reassignment.json")
            file.write_text(json.dumps({"version": 1, "partitions": partitions}))
            server = ("--bootstrap-server", self._cluster.bootstrap)
            tools = "org.apache.kafka.tools."
            steps = (
                (tools + "reassign.ReassignPartitionsCommand", *server, "--reassignment-json-file", file, "--execute"),
                (tools + "LeaderElectionCommand", *server, "--election-type", "preferred", "--all-topic-partitions"),
            )
            for step in steps:
                await asyncio.to_thread(self._cluster.tool, *step)
            await self._traffic.until_served()

    async def _cancel(self) -> None:
        candidates = [s for s in self._traffic.open if s.cancelled_at is None and s.deadline is None]
        for sent in self._rng.sample(candidates, min(5, len(candidates))):
            await self._traffic.cancel(sent)

    async def _expire(self) -> None:
        some = [k for k in self._kinds if "max_token" not in k.body]
        await self._traffic.publish(self._rng.choices(some, k=5), deadline=self._rng.uniform(0.1, 4))

    async def _until_resumed(self) -> None:
        """Everything that the last kill interrupted has gone on, or ended."""
        if not self.report.hand_overs:
            return
        last = self.report.hand_overs[-1]
        end = time.monotonic() + 60
        while time.monotonic() < end:
            waiting = [s for s, attempt in last.running if not s.over and s.stream.attempt == attempt]
            if not waiting and time.monotonic() - last.at > 1.0:
                return
            await asyncio.sleep(0.05)

    async def _restore(self) -> None:
        """Everybody who ought to be there is."""
        self._fleet.bury()
        while True:
            try:
                await self._wait_for_members(self._plan.workers)
            except WorkerDied:
                self._fleet.bury()
            else:
                return

    async def _call(self, number: int, over: asyncio.Event) -> None:
        """The product's own client, so many calls at once; each answer must be that of the undisturbed run."""
        if not number:
            return
        some = [k for k in self._kinds if k.repeatable and k.stream and "max_token" not in k.body]
        async with Client(connection=self._connection) as client:

            async def calls(rng: random.Random) -> None:
                while not over.is_set():
                    kind = rng.choice(some)
                    try:
                        completion = await client.complete(tier=rng.choice(LANES), **kind.body)
                    except (ServiceError, TimeoutError) as error:
                        if isinstance(error, BrokerUnavailable) and self._broker_fault.locked():
                            self.report.verdict.counts["calls of the client without a broker"] += 1
                            continue  # a busy machine's broker may take longer to start than a client waits
                        self.report.verdict.add("calls of the client that failed", repr(error))
                        await asyncio.sleep(0.5)
                        continue
                    self.report.verdict.counts["calls of the client"] += 1
                    self._completions.append((kind, [list(c.token_ids) for c in completion.choices]))

            await asyncio.gather(*(calls(random.Random(f"{self._plan.seed}/{i}")) for i in range(number)))

    # The verdict

    async def _judge(self, expected: dict[int, judge.Answer]) -> None:
        verdict, bootstrap = self.report.verdict, self._cluster.bootstrap
        self._said("reading every reply log again")
        sent = self._traffic.sent
        streams = await judge.read_again(bootstrap, sent, self._reader, verdict)
        judge.judge_answers(sent, streams, expected, verdict)
        judge.judge_cuts(sent, streams, self._traffic.ended_at, self._traffic.served_until, verdict)
        for kind, choices in self._completions:
            if choices != [expected[kind.number].token_ids[c] for c in range(len(choices))]:
                verdict.add("answers that differ from the undisturbed run", f"kind {kind.number}, through the client")
        await judge.judge_topics(bootstrap, sent, verdict)
        self._said("probes")
        began = time.monotonic()
        await self._until_ended(await self._traffic.probe(PARTITIONS))
        judge.judge_blocks(self._fleet.idle(), verdict, began)
        await judge.judge_commits(bootstrap, verdict)
        await self._traffic.delete_topics()
        await judge.judge_leftovers(self._connection, verdict)
        self._fleet.bury()
        for death in self._fleet.deaths:
            verdict.add("workers that died by themselves", death)
