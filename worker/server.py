"""Serves request records: from a delivery to its accepted `end`, by the writer rule (protocol.md 5).

One task per record. It decodes and tokenises, waits for admission, begins an attempt, hands the request to the engine
(which need not wait for the acknowledgement of `begin`), writes what the engine gives, one record at a time, and marks
the input done when an `end` is accepted. What is decided about the log is decided by `transport.attempt`.
"""

import asyncio
import random
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial

import structlog

from schemas.codec import ContentType, decode_map
from schemas.errors import DecodeError, RequestError, Unanswerable
from schemas.headers import ReplyAddress, RequestHeaders, read_reply_address, read_request_headers
from schemas.reasons import ErrorCode, FinishReason
from schemas.records import Begin, Cancel, End, ErrorInfo, InputRef, Timing, Usage
from schemas.reply_log import ReplyLog
from schemas.request import PromptRequest, parse_request
from schemas.topics import CANCEL_TTL_MS, Tier
from worker.admission_gate import AdmissionGate
from worker.cancels import Cancels
from worker.engine.admission import Begun, Delay, Refuse
from worker.engine.request import Request
from worker.loop import EngineLoop, EventStream
from worker.prepare import ModelFacts, Prompt, check_fields, check_tier, engine_request, sampling_params, tokenise
from worker.reply_progress import ReplyProgress
from worker.side_topics import SideTopics
from worker.telemetry import RequestSpan, log_finished
from worker.transport.attempt import Attempt, Verdict
from worker.transport.protocols import Delivery, RecordTooLarge, ReplySink, ReplyTopicGone, RequestSource

MAX_AGE_S = 600.0  # a producer's clock may be wrong: how old a request may make itself
MAX_ERROR_CHARS = 1000
LONG_VALUE_BYTES = 8192  # longer values are decoded and tokenised off the event loop: they may take seconds
AGAIN_S = 0.05  # before another attempt, so that two that fence each other do not spin
TWIN_POLL_S = 0.5
LOAD_CODES = (ErrorCode.OVERLOADED, ErrorCode.QUOTA_EXCEEDED, ErrorCode.DEADLINE_UNREACHABLE)  # not for what has begun
SEED_BITS = 53  # drawn seeds survive JSON readers that hold numbers as doubles

_NO_HEADERS = RequestHeaders(priority=None, deadline_ms=None, content_type=ContentType.MSGPACK)  # until they are read

log = structlog.get_logger(__name__)


class Outcome(Enum):
    """How the service of one record ended."""

    ANSWERED = "answered"  # an attempt at this record has its `end` accepted
    DUPLICATE = "duplicate"  # another record of the same request was answered
    UNDELIVERABLE = "reply_undeliverable"  # the reply topic does not exist
    DEAD_LETTER = "dead_letter"  # nobody can be answered: it is on the DLQ
    LOST = "lost"  # the partition went elsewhere; its new owner goes on


@dataclass(frozen=True, slots=True)
class ServerConfig:
    worker: str  # name of this worker in `begin`
    tiers: dict[str, Tier]
    tiers_of: Callable[[str], Collection[str]]  # those that a tenant may use
    priority_class: Callable[[int], int]  # of an effective priority
    reply_prefixes: tuple[str, ...]
    forbidden_topics: frozenset[str]
    default_reply_topic: str | None
    dlq_topic: str
    usage_topic: str


@dataclass(slots=True, eq=False)
class _Call:
    """One record in service."""

    delivery: Delivery
    address: ReplyAddress
    tier: Tier
    span: RequestSpan
    arrival: float  # on the engine's clock, when the record was published
    headers: RequestHeaders = _NO_HEADERS
    request: PromptRequest | None = None
    prompt: Prompt | None = None
    seed: int = 0
    refusal: RequestError | None = None
    must_begin: bool = False  # an `end` without an attempt did not count: end inside one
    num_attempts: int = 0
    admitted: Request | None = None  # what admission knows of it, from when it is asked until it is released
    engine_id: str = ""  # of the engine request that runs for it, "" for none
    num_output: int = 0  # tokens of its answer so far, over all choices
    end: End | None = None  # the accepted one
    ended_by: InputRef | None = None  # the input record whose attempt wrote it, None when no attempt did

    @property
    def tenant(self) -> str:
        return self.tier.tenant or self.headers.tenant

    @property
    def stream(self) -> bool:
        return self.request is None or self.request.stream

    @property
    def single_end(self) -> bool:
        """Nothing but one `end` with attempt -1 is written: a request-reply client takes the first record (5.6)."""
        return not self.address.per_request and not self.stream


class RequestServer:
    """Runs one task per delivery. `tasks` is the caller's group: an exception in it is a bug and ends the worker."""

    def __init__(
        self,
        config: ServerConfig,
        model: ModelFacts,
        engine: EngineLoop,
        gate: AdmissionGate,
        sink: ReplySink,
        sources: dict[str, RequestSource],
        tasks: asyncio.TaskGroup,
        wall_ms: Callable[[], float] = lambda: time.time() * 1000,
        on_end: Callable[[str, int, End], None] | None = None,
    ) -> None:
        """on_end: called with (tier, choices, accepted end) of every request that is over."""
        self._config = config
        self._on_end = on_end
        self._model = model
        self._engine = engine
        self._gate = gate
        self._sink = sink
        self._sources = sources
        self._side = SideTopics(sink, sources, config.dlq_topic, config.usage_topic, model.name, wall_ms)
        self._tasks = tasks
        self._wall_ms = wall_ms
        self._calls: dict[_Call, asyncio.Task[None]] = {}
        self._by_correlation_id: dict[bytes, list[_Call]] = {}
        self._burials: list[asyncio.Task[None]] = []
        self._cancels = Cancels(CANCEL_TTL_MS / 1000)
        self._num_engine_requests = 0
        self._num_lost = 0
        self._seeds = random.SystemRandom()

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    # What comes in

    def deliver(self, delivery: Delivery) -> None:
        """Starts to serve a record. Whatever is in it, this raises nothing."""
        try:
            self._take_in(delivery)
        except Unanswerable as e:
            self._start_burying(delivery, e.reason, str(e))
        except Exception as e:
            log.exception("request.not_taken_in", input=delivery.source.to_fields())
            self._start_burying(delivery, "internal", repr(e))

    def _take_in(self, delivery: Delivery) -> None:
        address = read_reply_address(
            delivery.headers,
            delivery.source,
            reply_prefixes=self._config.reply_prefixes,
            forbidden=self._config.forbidden_topics,
            default_reply_topic=self._config.default_reply_topic,
        )
        age = (self._wall_ms() - delivery.source.timestamp_ms) / 1000
        call = _Call(
            delivery=delivery,
            address=address,
            tier=self._config.tiers[delivery.lane],
            span=RequestSpan(delivery.source.topic, delivery.headers),
            arrival=self._engine.clock.now() - min(max(0.0, age), MAX_AGE_S),
        )
        self._by_correlation_id.setdefault(address.correlation_id, []).append(call)
        task = self._calls[call] = self._tasks.create_task(self._serve(call), name=f"serve {delivery.source}")
        task.add_done_callback(lambda _: self._forget(call))  # one that is cancelled before it starts runs nothing

    def _start_burying(self, delivery: Delivery, reason: str, message: str) -> None:
        task = self._tasks.create_task(self._bury_for_good(delivery, reason, message), name=f"bury {delivery.source}")
        self._burials.append(task)
        task.add_done_callback(self._burials.remove)

    def cancel(self, cancel: Cancel) -> None:
        """Ends the request wherever it is; one that has not arrived yet ends when it does."""
        self._cancels.add(cancel.correlation_id, self._engine.clock.now())
        for call in self._by_correlation_id.get(cancel.correlation_id, ()):
            if call.engine_id:
                self._engine.cancel(call.engine_id, FinishReason.CANCELLED)
            elif call.admitted is not None:
                self._gate.wake(call.admitted.request_id)

    def drop_lost(self, lane: str) -> None:
        """Partitions of a lane went elsewhere: their new owners go on with what ran here."""
        for call, task in self._calls.items():
            if call.delivery.lane == lane and not self._sources[lane].owns(call.delivery):
                self._release(call)  # at once: what it holds of its tenant's quota is not in the way of others
                task.cancel()

    async def drain(self, timeout: float) -> int:
        """Waits until everything is answered, at most `timeout` seconds; drops the rest without an `end`, so that
        the next owner resumes it. What waits for its quota is dropped at once. Returns how many were dropped."""
        self._gate.close()
        num_lost = self._num_lost
        serving = [*self._calls.values(), *self._burials]
        if serving:
            await asyncio.wait(serving, timeout=timeout)
        left = [task for task in serving if not task.done()]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        return len(left) + self._num_lost - num_lost

    # One record's service

    async def _serve(self, call: _Call) -> None:
        try:
            outcome = await self._outcome(call)
            if outcome is not Outcome.LOST:
                self._sources[call.delivery.lane].done(call.delivery)
            self._num_lost += outcome is Outcome.LOST
            self._log(call, outcome)
        except Exception:
            # Nothing more can be tried here. It stays undone, so the partition's next owner tries again.
            log.exception("request.abandoned", input=call.delivery.source.to_fields())
        finally:
            self._forget(call)

    def _forget(self, call: _Call) -> None:
        """Its service is over. Again: nothing."""
        if self._calls.pop(call, None) is None:
            return
        self._release(call)
        call.span.finish()
        twins = self._by_correlation_id[call.address.correlation_id]
        twins.remove(call)
        if not twins:
            del self._by_correlation_id[call.address.correlation_id]
        if not any(twin.address.topic == call.address.topic for twin in twins):
            self._sink.forget(call.address)  # not before: a twin writes to the same log

    async def _outcome(self, call: _Call) -> Outcome:
        try:
            await self._prepare(call)
            return await self._settle(call)
        except RecordTooLarge as e:
            code, message = ErrorCode.INVALID_REQUEST, f"the answer does not fit into one record: {e}"
        except Exception as e:
            # A fault of ours, or a reply log that somebody else broke: it must not take other requests with it.
            log.exception("request.failed", input=call.delivery.source.to_fields())
            await self._side.bury(call.delivery, "internal", repr(e))
            code, message = ErrorCode.INTERNAL, "the worker failed at this request; its log says how"
        call.refusal = RequestError(code, message)
        call.must_begin = not call.single_end
        try:
            return await self._settle(call)
        except Exception:
            log.exception("request.not_answered", input=call.delivery.source.to_fields())
            return Outcome.DEAD_LETTER

    async def _settle(self, call: _Call) -> Outcome:
        """Answers, and does what the answer needs beside it: a DLQ record, a usage record."""
        if isinstance(call.refusal, DecodeError):
            await self._side.bury(call.delivery, call.refusal.code, str(call.refusal))
        try:
            outcome = await self._answer(call)
        except ReplyTopicGone:
            outcome = Outcome.UNDELIVERABLE
        if outcome is Outcome.UNDELIVERABLE and call.address.topic == self._config.default_reply_topic:
            if not isinstance(call.refusal, DecodeError):
                await self._side.bury(call.delivery, "no_reply_topic", "no reply_to, and no default reply topic")
            return Outcome.DEAD_LETTER
        if outcome is Outcome.ANSWERED:
            assert call.end is not None
            correlation_id = call.address.correlation_id
            await self._side.publish_usage(call.delivery, call.end, tenant=call.tenant, correlation_id=correlation_id)
        return outcome

    async def _prepare(self, call: _Call) -> None:
        """Decodes, checks and tokenises. What is wrong with the request becomes `call.refusal`."""
        try:
            call.headers = read_request_headers(call.delivery.headers, lane_tenant=call.tier.tenant)
            check_tier(call.tenant, call.tier.name, self._config.tiers_of(call.tenant))
            if len(call.delivery.value or b"") > LONG_VALUE_BYTES:
                await asyncio.to_thread(self._decode, call)
            else:
                self._decode(call)
        except RequestError as e:
            call.refusal = e

    def _decode(self, call: _Call) -> None:
        """Sets request, prompt and seed. Raises RequestError."""
        call.request = parse_request(decode_map(call.delivery.value, call.headers.content_type))
        check_fields(call.request, self._model)
        call.prompt = tokenise(call.request, call.tier, self._model)
        call.seed = self._seeds.getrandbits(SEED_BITS) if call.request.seed is None else call.request.seed

    async def _answer(self, call: _Call) -> Outcome:
        """Attempts until an `end` is accepted, the caller is gone, or the record is no longer ours."""
        while True:
            located = await self._sink.locate(call.address)
            if located is None:
                return Outcome.UNDELIVERABLE
            call.address = located
            if self._older_twin(call):
                verdict = Verdict.WAIT
            elif not await self._enter(call):
                return Outcome.LOST
            else:
                call.num_attempts += 1
                verdict = await self._attempt(call)
            if verdict is Verdict.DONE:
                ours = call.ended_by is None or call.ended_by == call.delivery.source
                return Outcome.ANSWERED if ours else Outcome.DUPLICATE
            if verdict is Verdict.WAIT:
                self._release(call)
                await self._wait_for_twin(call)
                return Outcome.DUPLICATE
            if not self._sources[call.delivery.lane].owns(call.delivery):
                return Outcome.LOST
            await asyncio.sleep(AGAIN_S)

    # Admission

    async def _enter(self, call: _Call) -> bool:
        """Waits for admission, once; a refusal becomes `call.refusal`. False: the worker drains, it stays undone.

        A refusal that did not count, because somebody has begun the request, or the send failed, is decided again.
        """
        if call.refusal is not None and call.refusal.code in LOAD_CODES:
            call.refusal, call.must_begin = None, False
        elif call.refusal is not None or call.admitted is not None:
            return True
        call.admitted = self._new_request(call)

        def is_cancelled() -> bool:
            return self._cancels.covers(call.address.correlation_id, self._engine.clock.now())

        if is_cancelled():
            return True
        decision = await self._gate.enter(call.admitted, partial(self._begun, call), is_cancelled)
        if isinstance(decision, Refuse):
            call.admitted = None
            call.refusal = RequestError(decision.code, decision.message, decision.retry_after_ms)
        return not isinstance(decision, Delay)

    async def _begun(self, call: _Call) -> Begun:
        """Whether an earlier attempt has begun it (5.8). Raises ReplyTopicGone."""
        source = call.delivery.source
        if call.single_end or not (call.num_attempts or call.delivery.tracker.is_inherited(source.offset)):
            return Begun.NO
        if not call.address.per_request:
            return Begun.PERHAPS  # to know, one would have to read the traffic of all who share the log
        seen = await self._sink.read(call.address, 0, None)
        return Begun.NO if seen.attempt is None and not seen.ended else Begun.YES

    def _release(self, call: _Call) -> None:
        """Gives back what it holds of the engine and of its tenant's quota. Again: nothing."""
        self._drop_engine_request(call)
        if call.admitted is not None:
            self._gate.leave(call.admitted, call.num_output)
            call.admitted = None

    def _older_twin(self, call: _Call) -> bool:
        """Whether an older record of the same request is in service here: then ours would only fence it (5.5)."""
        return any(
            (other.address.topic, other.address.partition) == (call.address.topic, call.address.partition)
            and other.delivery.source.age_key < call.delivery.source.age_key
            for other in self._by_correlation_id[call.address.correlation_id]
        )

    async def _wait_for_twin(self, call: _Call) -> None:
        """Returns when the log has an accepted `end`, or nobody waits for it any more. Raises ReplyTopicGone."""
        deadline = self._deadline(call)
        while not (await self._sink.read(call.address, 0, None)).ended:
            now = self._engine.clock.now()
            if self._cancels.covers(call.address.correlation_id, now) or (deadline is not None and now > deadline):
                return
            await asyncio.sleep(TWIN_POLL_S)

    # One attempt

    async def _attempt(self, call: _Call) -> Verdict:
        attempt = Attempt(call.delivery.source, call.address.per_request)
        if call.refusal is not None and not call.must_begin and self._may_end_without_attempt(call):
            call.must_begin = not call.single_end
            return await self._end_without_attempt(call, attempt, self._refusal(call, -1, ReplyProgress(1, False)))
        if call.single_end:
            progress = ReplyProgress(_request(call).n, _request(call).logprobs is not None)
            stream = self._start(call, None)
            while not progress.finished:
                for event in await stream.take():
                    progress.add(event)
                call.num_output = progress.num_completion_tokens
            return await self._end_without_attempt(call, attempt, self._end(call, -1, stream, progress))
        stream = self._start(call, None) if call.refusal is None else None
        attempt.begins()
        verdict = attempt.acknowledged(await self._sink.send(call.address, self._begin(call), call.span.traceparent))
        resumed = None
        if verdict is Verdict.READ:
            resumed = await self._sink.read(call.address, 0, attempt.read_until)
            verdict = self._note_end(call, attempt.read(resumed), resumed)
        if verdict is not Verdict.GO_ON:
            return verdict
        if stream is not None and resumed is not None:
            stream = self._resume(call, stream, resumed)
        return await self._write(call, attempt, stream, resumed)

    def _may_end_without_attempt(self, call: _Call) -> bool:
        """On a shared log nobody tells whether an attempt has begun; only what no worker could decode never has."""
        return call.address.per_request or call.request is None or call.single_end

    async def _end_without_attempt(self, call: _Call, attempt: Attempt, end: End) -> Verdict:
        attempt.refuses()
        verdict = attempt.acknowledged(await self._sink.send(call.address, end, call.span.traceparent))
        if verdict is Verdict.DONE:
            call.end = end
        if verdict is Verdict.READ:
            seen = await self._sink.read(call.address, 0, attempt.read_until)
            verdict = self._note_end(call, attempt.read(seen), seen)
        return verdict

    async def _write(
        self, call: _Call, attempt: Attempt, stream: EventStream | None, resumed: ReplyLog | None
    ) -> Verdict:
        """Publishes what the engine gives, one record at a time, and the `end`."""
        assert attempt.number is not None
        request = call.request
        progress = ReplyProgress(
            request.n if request else 1, request is not None and request.logprobs is not None, resumed
        )
        loop, not_before = asyncio.get_running_loop(), None
        while stream is not None and not progress.finished:
            for event in await stream.take(not_before):
                progress.add(event)
            call.num_output = progress.num_completion_tokens
            if not call.stream:
                continue
            while record := progress.take_record(attempt.number):
                not_before = loop.time() + call.tier.flush_ms / 1000
                verdict = attempt.acknowledged(await self._sink.send(call.address, record))
                if verdict is Verdict.READ:
                    verdict = await self._read_gap(call, attempt)
                if verdict is not Verdict.GO_ON:
                    return verdict
        if stream is None:
            end = self._refusal(call, attempt.number, progress)
        else:
            end = self._end(call, attempt.number, stream, progress)
        attempt.ends()
        verdict = attempt.acknowledged(await self._sink.send(call.address, end, call.span.traceparent))
        if verdict is Verdict.READ:
            return await self._read_gap(call, attempt)
        if verdict is Verdict.DONE:
            call.end, call.ended_by = end, call.delivery.source
        return verdict

    async def _read_gap(self, call: _Call, attempt: Attempt) -> Verdict:
        assert attempt.number is not None
        start = 0 if call.address.per_request else attempt.number
        seen = await self._sink.read(call.address, start, attempt.read_until)
        return self._note_end(call, attempt.read(seen), seen)

    def _note_end(self, call: _Call, verdict: Verdict, seen: ReplyLog) -> Verdict:
        if verdict is Verdict.DONE:
            call.end, call.ended_by = seen.end, seen.begin.input if seen.begin else None
        return verdict

    # The engine's side

    def _new_id(self, call: _Call) -> str:
        self._num_engine_requests += 1
        return f"{call.address.correlation_id.decode(errors='replace')}#{self._num_engine_requests}"

    def _new_request(self, call: _Call) -> Request:
        assert call.prompt is not None
        priority = call.tier.priority(call.headers.priority)
        return engine_request(
            self._new_id(call),
            _request(call),
            call.prompt,
            call.seed,
            self._model,
            lane=call.delivery.lane,
            tenant=call.tenant,
            priority=priority,
            priority_class=self._config.priority_class(priority),
            arrival=call.arrival,
            deadline=self._deadline(call),
        )

    def _start(self, call: _Call, resumed: ReplyLog | None) -> EventStream:
        """Hands it to the engine, to go on after the tokens of `resumed`, with the seed of the call."""
        assert call.admitted is not None, "admission has not been asked"
        admitted, accepted = call.admitted, resumed.token_ids if resumed is not None else {}
        self._drop_engine_request(call)
        call.engine_id = self._new_id(call)
        request = replace(
            admitted,
            request_id=call.engine_id,
            sampling=sampling_params(_request(call), call.seed, self._model.vocab_size),
            accepted=tuple(tuple(accepted.get(i, ())) for i in range(admitted.n)) if accepted else (),
        )
        stream = self._engine.add(request, partial(self._gate.started, admitted.request_id))
        if self._cancels.covers(call.address.correlation_id, self._engine.clock.now()):
            self._engine.cancel(call.engine_id, FinishReason.CANCELLED)
        return stream

    def _resume(self, call: _Call, stream: EventStream, resumed: ReplyLog) -> EventStream:
        """Goes on where earlier attempts stopped, with the seed of the first (rule 2)."""
        seed = resumed.first_begin.seed if resumed.first_begin is not None else call.seed
        if seed == call.seed and not any(resumed.token_ids.values()):
            return stream
        if call.num_attempts == 1 and call.admitted is not None:
            self._gate.waive(call.admitted.request_id)
        call.seed = seed
        return self._start(call, resumed)

    def _deadline(self, call: _Call) -> float | None:
        deadline_ms = call.headers.deadline_ms
        if deadline_ms is None and call.tier.default_deadline_ms is not None:
            deadline_ms = call.delivery.source.timestamp_ms + call.tier.default_deadline_ms
        return None if deadline_ms is None else self._engine.clock.now() + (deadline_ms - self._wall_ms()) / 1000

    def _drop_engine_request(self, call: _Call) -> None:
        if call.engine_id:
            self._engine.abort(call.engine_id)
            call.engine_id = ""

    # Records

    def _begin(self, call: _Call) -> Begin:
        return Begin(
            restart=not call.address.per_request,
            worker=self._config.worker,
            model=self._model.name,
            prompt_tokens=len(call.prompt.token_ids) if call.prompt else 0,
            seed=call.seed,
            queued_ms=_ms(self._engine.clock.now() - call.arrival),
            input=call.delivery.source,
        )

    def _end(self, call: _Call, attempt: int, stream: EventStream, progress: ReplyProgress) -> End:
        now = self._engine.clock.now()
        started = stream.admitted_at if stream.admitted_at is not None else now
        timing = Timing(
            queued_ms=_ms(started - call.arrival),
            ttft_ms=_ms(stream.first_token_at - call.arrival) if stream.first_token_at is not None else None,
            total_ms=_ms(now - call.arrival),
        )
        assert call.prompt is not None
        return progress.end(attempt, len(call.prompt.token_ids), timing, whole=not call.stream)

    def _refusal(self, call: _Call, attempt: int, progress: ReplyProgress) -> End:
        assert call.refusal is not None
        waited = _ms(self._engine.clock.now() - call.arrival)
        return End(
            attempt=attempt,
            finish_reason=FinishReason.ERROR,
            error=ErrorInfo(call.refusal.code, str(call.refusal)[:MAX_ERROR_CHARS], call.refusal.retry_after_ms),
            usage=Usage(len(call.prompt.token_ids) if call.prompt else 0, progress.num_completion_tokens),
            timing=Timing(waited, None, waited),
        )

    # Other topics

    async def _bury_for_good(self, delivery: Delivery, reason: str, message: str) -> None:
        try:
            if await self._side.bury(delivery, reason, message):
                self._sources[delivery.lane].done(delivery)
        except Exception:
            log.exception("request.abandoned", input=delivery.source.to_fields())

    def _log(self, call: _Call, outcome: Outcome) -> None:
        call.span.record_end(outcome.value, call.end)
        if self._on_end is not None and call.end is not None and call.request is not None:
            self._on_end(call.delivery.lane, call.request.n, call.end)
        log_finished(
            outcome.value,
            call.end,
            correlation_id=call.address.correlation_id.decode(errors="replace"),
            tenant=call.tenant,
            tier=call.delivery.lane,
            input=call.delivery.source.to_fields(),
            attempts=call.num_attempts,
            trace_id=call.span.trace_id,
        )


def _request(call: _Call) -> PromptRequest:
    assert call.request is not None
    return call.request


def _ms(seconds: float) -> float:
    return round(max(0.0, seconds) * 1000, 3)
