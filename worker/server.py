"""Serves request records: from a delivery to its accepted `end`, by the writer rule (protocol.md 5).

One task per record. It decodes and tokenises, waits for admission, begins an attempt, hands the request to the engine
(before `begin` is acknowledged, unless somebody may have died of it), writes what the engine gives, one record at a
time, and marks the input done when an `end` is accepted. What is decided about the log, `transport.attempt` decides.
"""

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import structlog

from schemas.codec import decode_map
from schemas.errors import DecodeError, RequestError, Unanswerable
from schemas.headers import ReplyAddress, read_reply_address, read_request_headers
from schemas.reasons import DeadLetterReason, ErrorCode, FinishReason
from schemas.records import Begin, Cancel, End, event_of
from schemas.reply_log import ReplyLog
from schemas.request import parse_request
from schemas.topics import CANCEL_TTL_MS
from worker.admission_gate import AdmissionGate
from worker.call import Call, Outcome, ServerConfig
from worker.cancels import Cancels
from worker.engine.admission import Begun, Delay, Refuse
from worker.engine.request import Request
from worker.leaving import HANGS_S, LEFT_S, Leaving
from worker.loop import EngineLoop, EventStream
from worker.prepare import ModelFacts, check_fields, check_tier, engine_request, sampling_params, tokenise
from worker.reply_progress import ReplyProgress
from worker.side_topics import SideTopics
from worker.suspects import Suspects
from worker.telemetry import Telemetry
from worker.transport.attempt import Attempt, Verdict
from worker.transport.protocols import (
    Delivery,
    RecordTooLarge,
    ReplySink,
    ReplyTopicGone,
    ReplyUnauthorised,
    RequestSource,
)

MAX_AGE_S = 600.0  # a producer's clock may be wrong: how old a request may make itself
LONG_VALUE_BYTES = 8192  # longer values are decoded and tokenised off the event loop: they may take seconds
AGAIN_S = 0.05  # before another attempt, so that two that fence each other do not spin
TWIN_POLL_S = 0.5
MAX_TOO_LARGE = 3  # attempts at which a shared reply topic refused a record's size; then the answer is an error
LOAD_CODES = (ErrorCode.OVERLOADED, ErrorCode.QUOTA_EXCEEDED, ErrorCode.DEADLINE_UNREACHABLE)  # not for what has begun
SEED_BITS = 53  # drawn seeds survive JSON readers that hold numbers as doubles

log = structlog.get_logger(__name__)


class RequestServer:
    """Runs one task per delivery. `tasks` is the caller's group: an exception in it is a bug and ends the worker."""

    def __init__(
        self,
        config: ServerConfig,
        model: ModelFacts,
        engine: EngineLoop,
        gate: AdmissionGate,
        sink: ReplySink,
        sources: Mapping[str, RequestSource],
        tasks: asyncio.TaskGroup,
        wall_ms: Callable[[], float] = lambda: time.time() * 1000,
        telemetry: Telemetry | None = None,
    ) -> None:
        self._config = config
        self._model = model
        self._engine = engine
        self._gate = self.gate = gate
        self._sink = sink
        self._sources = sources
        self._telemetry = telemetry or Telemetry.unheard(config.worker, config.tiers, model.name, engine.clock)
        self._side = SideTopics(
            sink, sources, config.dlq_topic, config.usage_topic, model.name, wall_ms, self._telemetry.metrics
        )
        self._tasks = tasks
        self._wall_ms = wall_ms
        self._calls: dict[Call, asyncio.Task[None]] = {}
        self._by_correlation_id: dict[bytes, list[Call]] = {}
        self._burials: list[asyncio.Task[None]] = []
        self._cancels = Cancels(CANCEL_TTL_MS / 1000)
        self._suspects = Suspects(config.max_fruitless_attempts)
        self._leaving = Leaving(sink, self._forget_log)
        self._num_engine_requests = 0
        self._num_lost = 0
        self._seeds = random.SystemRandom()

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    @property
    def calls(self) -> list[Call]:
        """In service now. For any thread."""
        return list(self._calls)

    # What comes in

    def deliver(self, delivery: Delivery) -> None:
        """Starts to serve a record. Whatever is in it, this raises nothing."""
        self._telemetry.metrics.consumed(delivery.source.topic)
        try:
            self._take_in(delivery)
        except Unanswerable as e:
            self._start_burying(delivery, e.reason, str(e))
        except Exception as e:
            log.exception("request.not_taken_in", input=delivery.source.to_fields())
            self._start_burying(delivery, DeadLetterReason.INTERNAL, repr(e))

    def _take_in(self, delivery: Delivery) -> None:
        address = read_reply_address(
            delivery.headers,
            delivery.source,
            reply_prefixes=self._config.reply_prefixes,
            forbidden=self._config.forbidden_topics,
            default_reply_topic=self._config.default_reply_topic,
        )
        age = (self._wall_ms() - delivery.source.timestamp_ms) / 1000
        now = self._now()
        call = Call(
            delivery=delivery,
            address=address,
            tier=self._config.tiers[delivery.lane],
            trace=self._telemetry.trace(delivery),
            taken_in=now,
            arrival=now - min(max(0.0, age), MAX_AGE_S),
        )
        self._by_correlation_id.setdefault(address.correlation_id, []).append(call)
        task = self._calls[call] = self._tasks.create_task(self._serve(call), name=f"serve {delivery.source}")
        task.add_done_callback(lambda _: self._forget(call))  # one that is cancelled before it starts runs nothing

    def _start_burying(self, delivery: Delivery, reason: DeadLetterReason, message: str) -> None:
        task = self._tasks.create_task(self._bury_for_good(delivery, reason, message), name=f"bury {delivery.source}")
        self._burials.append(task)
        task.add_done_callback(self._burials.remove)

    def _now(self) -> float:
        return self._engine.clock.now()

    def cancel(self, cancel: Cancel) -> None:
        """Ends the request wherever it is; one that has not arrived yet ends when it does."""
        self._cancels.add(cancel.correlation_id, self._now())
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
                call.given_up = True
                task.cancel()

    async def drain(self, timeout: float) -> int:
        """Waits until everything is answered, at most `timeout` seconds; drops the rest without an `end`, so that
        the next owner resumes it. What waits for its quota is dropped at once. Returns how many were dropped."""
        self._gate.close()
        num_lost = self._num_lost
        calls, serving = list(self._calls), [*self._calls.values(), *self._burials]
        if serving:
            await asyncio.wait(serving, timeout=timeout - min(LEFT_S, timeout / 10))
        for call in calls:
            call.given_up = True  # nothing, where it has ended
        dropped = [task for task in serving if not task.done()]
        for task in dropped:
            task.cancel()
        await asyncio.gather(*dropped, return_exceptions=True)
        await self._leaving.close(LEFT_S)
        return len(dropped) + self._num_lost - num_lost

    # One record's service

    async def _serve(self, call: Call) -> None:
        self._telemetry.bind(call.delivery, call.trace, call.correlation_id)
        try:
            outcome = await self._outcome(call)
            call.given_up = outcome is Outcome.LOST
            if not call.given_up:
                self._sources[call.delivery.lane].done(call.delivery)
            self._num_lost += call.given_up
            self._telemetry.finished(call, outcome)
        except Exception:
            # Nothing more can be tried here. It stays undone, so the partition's next owner tries again.
            call.given_up = True
            log.exception("request.abandoned", input=call.delivery.source.to_fields())
        finally:
            self._forget(call)

    def _forget(self, call: Call) -> None:
        """Its service is over. Again: nothing."""
        if self._calls.pop(call, None) is None:
            return
        self._release(call)
        self._telemetry.finished(call, Outcome.LOST)
        twins = self._by_correlation_id[call.address.correlation_id]
        twins.remove(call)
        if not twins:
            del self._by_correlation_id[call.address.correlation_id]
        # What was cancelled without being given up is not left: the worker ends at once, perhaps because of it.
        hangs = self._engine.step_seconds >= HANGS_S  # as good as dead, and perhaps because of it, too
        if hangs or not (call.given_up and self._leaving.leave(call)):
            self._forget_log(call.address)

    def _forget_log(self, address: ReplyAddress) -> None:
        """One who wrote to that log does so no more; perhaps a twin does."""
        twins = self._by_correlation_id.get(address.correlation_id, ())
        if not any(twin.address.topic == address.topic for twin in twins):
            self._sink.forget(address)

    async def _outcome(self, call: Call) -> Outcome:
        try:
            await self._prepare(call)
            return await self._settle(call)
        except RecordTooLarge as e:
            code, message = ErrorCode.INVALID_REQUEST, f"the answer does not fit into one record: {e}"
        except Exception as e:
            # A fault of ours, or a reply log that somebody else broke: it must not take other requests with it.
            log.exception("request.failed", input=call.delivery.source.to_fields())
            await self._side.bury(call.delivery, call.trace, DeadLetterReason.INTERNAL, repr(e))
            code, message = ErrorCode.INTERNAL, "the worker failed at this request; its log says how"
        call.refusal = RequestError(code, message)
        call.must_begin = not call.single_end
        try:
            return await self._settle(call)
        except RecordTooLarge as e:
            message = f"the reply topic {call.address.topic} takes not even an error: {e}"
            await self._side.bury(call.delivery, call.trace, DeadLetterReason.REPLY_TOO_LARGE, message)
            return Outcome.DEAD_LETTER
        except Exception:
            log.exception("request.not_answered", input=call.delivery.source.to_fields())
            return Outcome.DEAD_LETTER

    async def _settle(self, call: Call) -> Outcome:
        """Answers, and does what the answer needs beside it: a DLQ record, a usage record."""
        if isinstance(call.refusal, DecodeError):
            await self._side.bury(call.delivery, call.trace, DeadLetterReason.INVALID_REQUEST, str(call.refusal))
        try:
            outcome = await self._answer(call)
        except ReplyTopicGone:
            outcome = Outcome.UNDELIVERABLE
        except ReplyUnauthorised as e:
            message = f"this worker may not use the reply topic {e}"
            await self._side.bury(call.delivery, call.trace, DeadLetterReason.REPLY_UNAUTHORISED, message)
            return Outcome.DEAD_LETTER
        if outcome is Outcome.UNDELIVERABLE and call.address.topic == self._config.default_reply_topic:
            if not isinstance(call.refusal, DecodeError):
                message = "no reply_to, and no default reply topic"
                await self._side.bury(call.delivery, call.trace, DeadLetterReason.NO_REPLY_TOPIC, message)
            return Outcome.DEAD_LETTER
        if outcome is Outcome.ANSWERED:
            assert call.end is not None
            correlation_id = call.address.correlation_id
            await self._side.publish_usage(call.delivery, call.end, tenant=call.tenant, correlation_id=correlation_id)
        return outcome

    async def _prepare(self, call: Call) -> None:
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
        self._telemetry.describe(call)

    def _decode(self, call: Call) -> None:
        """Sets request, prompt and seed. Raises RequestError."""
        call.request = parse_request(decode_map(call.delivery.value, call.headers.content_type))
        check_fields(call.request, self._model)
        call.prompt = tokenise(call.request, call.tier, self._model)
        call.seed = self._seeds.getrandbits(SEED_BITS) if call.request.seed is None else call.request.seed

    async def _answer(self, call: Call) -> Outcome:
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
                verdict = await self._try(call)
            if verdict is Verdict.DONE:
                ours = call.ended_by is None or call.ended_by == call.delivery.source
                return Outcome.ANSWERED if ours else Outcome.DUPLICATE
            if verdict is Verdict.WAIT:
                self._release(call)
                self._leaving.leave(call)
                await self._wait_for_twin(call)
                return Outcome.DUPLICATE
            if not self._sources[call.delivery.lane].owns(call.delivery):
                return Outcome.LOST
            await asyncio.sleep(AGAIN_S)

    async def _try(self, call: Call) -> Verdict:
        """An attempt. On a log that others write to a record may be refused for what it travelled with: once more."""
        try:
            return await self._attempt(call)
        except RecordTooLarge:
            call.num_too_large += 1
            if call.address.per_request or call.num_too_large >= MAX_TOO_LARGE:
                raise
            return Verdict.AGAIN

    # Admission

    async def _enter(self, call: Call) -> bool:
        """Waits for admission, once; a refusal becomes `call.refusal`. False: the worker drains, it stays undone.

        A refusal that did not count, because somebody has begun the request, or the send failed, is decided again.
        """
        if call.refusal is not None and call.refusal.code in LOAD_CODES:
            call.refusal, call.must_begin = None, False
        elif call.refusal is not None or call.admitted is not None:
            return True
        call.admitted = self._new_request(call)
        call.trace.waits(call.delivery.lane, call.admitted.priority)
        if self._is_cancelled(call):
            return True
        decision = await self._gate.enter(
            call.admitted,
            partial(self._begun, call),
            partial(self._is_cancelled, call),
            partial(self._telemetry.delayed, call),
        )
        if isinstance(decision, Refuse):
            call.admitted = None
            call.refusal = RequestError(decision.code, decision.message, decision.retry_after_ms)
        return not isinstance(decision, Delay)

    def _is_cancelled(self, call: Call) -> bool:
        return self._cancels.covers(call.address.correlation_id, self._now())

    def _is_over(self, call: Call) -> bool:
        """Whether nobody waits for its answer any more."""
        deadline = self._deadline(call)
        return self._is_cancelled(call) or (deadline is not None and deadline <= self._now())

    async def _begun(self, call: Call) -> Begun:
        """Whether an earlier attempt has begun it (5.8). Raises ReplyTopicGone."""
        if call.single_end or not (call.num_attempts or call.inherited):
            return Begun.NO
        if not call.address.per_request:
            return Begun.PERHAPS  # to know, one would have to read the traffic of all who share the log
        seen = await self._sink.read(call.address, 0, None)
        return Begun.NO if seen.attempt is None and not seen.ended else Begun.YES

    def _release(self, call: Call) -> None:
        """Gives back what it holds of the engine and of its tenant's quota. Again: nothing."""
        self._drop_engine_request(call)
        self._suspects.leave(call)
        if call.admitted is not None:
            self._gate.leave(call.admitted, call.num_output)
            call.admitted = None

    def _older_twin(self, call: Call) -> bool:
        """Whether an older record of the same request is in service here: then ours would only fence it (5.5)."""
        return any(
            (other.address.topic, other.address.partition) == (call.address.topic, call.address.partition)
            and other.delivery.source.age_key < call.delivery.source.age_key
            for other in self._by_correlation_id[call.address.correlation_id]
        )

    async def _wait_for_twin(self, call: Call) -> None:
        """Returns when the log has an accepted `end`, or nobody waits for it any more. Raises ReplyTopicGone."""
        while not (self._is_over(call) or (await self._sink.read(call.address, 0, None)).ended):
            await asyncio.sleep(TWIN_POLL_S)

    # One attempt

    async def _attempt(self, call: Call) -> Verdict:
        attempt = call.attempt = Attempt(call.delivery.source, call.address.per_request)
        if call.refusal is not None and not call.must_begin and call.may_end_without_attempt:
            call.must_begin = not call.single_end
            end = call.refusal_record(-1, ReplyProgress(1, False), self._now())
            return await self._end_without_attempt(call, attempt, end)
        if call.single_end:
            progress = ReplyProgress(call.asked().n, call.asked().logprobs is not None)
            events = self._start(call, None)
            while not progress.finished:
                for event in await events.take():
                    progress.add(event)
                call.num_output = progress.num_completion_tokens
            return await self._end_without_attempt(call, attempt, call.end_record(-1, events, progress, self._now()))
        guarded = self._suspects.may_include(call)
        before = await self._look_back(call) if guarded else None
        # What nobody can have tried is computed while `begin` is on its way.
        stream = self._start(call, None) if call.refusal is None and not guarded else None
        attempt.begins()
        begin = call.begin_record(self._config.worker, self._model.name, self._now())
        verdict = attempt.acknowledged(await self._send(call, begin))
        resumed = None
        if verdict is Verdict.READ:
            resumed = await self._read_begun(call, attempt, before, begin)
            verdict = self._note_end(call, attempt.read(resumed), resumed)
            self._telemetry.looked_back(resumed, self._model.name)
        if verdict is not Verdict.GO_ON:
            return verdict
        if guarded and resumed is not None and not await self._may_go_on(call, resumed, has_turn=before is not None):
            return Verdict.AGAIN
        if call.refusal is None:
            stream = self._resume(call, stream, resumed)
        self._telemetry.begun(call, attempt.number, resumed)
        return await self._write(call, attempt, stream, resumed)

    async def _look_back(self, call: Call) -> ReplyLog | None:
        """The log of a request that was taken in before, once it may be begun. None: nobody is known to have taken it
        in, which is all of a backlog that nobody has served; should somebody have, its `begin` is not at offset 0."""
        if call.num_attempts == 1 and not call.taken_in_before:
            return None
        seen = await self._sink.read(call.address, 0, None)
        waited = await self._suspects.turn(call, seen, partial(self._is_over, call))
        if waited and await self._sink.locate(call.address) is None:  # its caller may have gone meanwhile (5.10)
            raise ReplyTopicGone(call.address.topic)
        return seen

    async def _read_begun(self, call: Call, attempt: Attempt, before: ReplyLog | None, begin: Begin) -> ReplyLog:
        """The log up to our `begin`, which may have landed right behind what was read of it before."""
        if before is None or before.last_offset + 1 != attempt.read_until:
            return await self._sink.read(call.address, 0, attempt.read_until)
        before.feed(attempt.read_until, begin)
        return before

    async def _may_go_on(self, call: Call, resumed: ReplyLog, *, has_turn: bool) -> bool:
        """Sets the refusal of a request of which too many attempts left nothing. False: a suspect, it has left this
        attempt to wait for its turn first; or its partition went elsewhere before it was a dead letter."""
        fault = self._suspects.fault(resumed)
        if fault is not None:
            call.refusal, call.must_begin = RequestError(ErrorCode.INTERNAL, fault), True
            return await self._side.bury(call.delivery, call.trace, DeadLetterReason.FRUITLESS_ATTEMPTS, fault)
        if has_turn or not self._suspects.takes_turns(len(resumed.fruitless) - 1):
            return True
        if (leaving := self._leaving.leave(call)) is not None:
            await asyncio.wait([leaving])
        return False

    async def _end_without_attempt(self, call: Call, attempt: Attempt, end: End) -> Verdict:
        attempt.refuses()
        verdict = attempt.acknowledged(await self._send(call, end))
        if verdict is Verdict.DONE:
            call.end = end
        if verdict is Verdict.READ:
            seen = await self._sink.read(call.address, 0, attempt.read_until)
            verdict = self._note_end(call, attempt.read(seen), seen)
        return verdict

    async def _write(
        self, call: Call, attempt: Attempt, stream: EventStream | None, resumed: ReplyLog | None
    ) -> Verdict:
        """Publishes what the engine gives, one record at a time, and the `end`."""
        assert attempt.number is not None
        request = call.request
        progress = ReplyProgress(
            request.n if request else 1, request is not None and request.logprobs is not None, resumed
        )
        not_before, num_records = None, 1
        while stream is not None and not progress.finished:
            for event in await stream.take(not_before):
                progress.add(event)
            call.num_output = progress.num_completion_tokens
            if not call.stream:
                continue
            while record := progress.take_record(attempt.number):
                not_before = call.tier.next_flush(asyncio.get_running_loop().time())
                num_records += 1
                attempt.writes()
                verdict = attempt.acknowledged(await self._sink.send(call.address, record))
                if verdict is Verdict.READ:
                    verdict = await self._read_gap(call, attempt)
                if verdict is not Verdict.GO_ON:
                    return verdict
                self._suspects.leave(call)  # it has a token
        if stream is None:
            end = call.refusal_record(attempt.number, progress, self._now())
        else:
            end = call.end_record(attempt.number, stream, progress, self._now())
        attempt.ends()
        verdict = attempt.acknowledged(await self._send(call, end, num_records))
        if verdict is Verdict.READ:
            return await self._read_gap(call, attempt)
        if verdict is Verdict.DONE:
            call.end, call.ended_by = end, call.delivery.source
        return verdict

    async def _send(self, call: Call, record: Begin | End, num_before: int = 0) -> int | None:
        """Appends a `begin` or an `end`; num_before: records of its attempt. Returns its acknowledged offset."""
        if isinstance(record, End):
            call.trace.answered(record)
        with call.trace.sending(event_of(record), call.correlation_id) as sending:
            offset = await self._sink.send(call.address, record, sending.traceparent)
            sending.acknowledged(offset, num_before + 1)
        return offset

    async def _read_gap(self, call: Call, attempt: Attempt) -> Verdict:
        assert attempt.number is not None
        start = 0 if call.address.per_request else attempt.number
        seen = await self._sink.read(call.address, start, attempt.read_until)
        return self._note_end(call, attempt.read(seen), seen)

    def _note_end(self, call: Call, verdict: Verdict, seen: ReplyLog) -> Verdict:
        if verdict is Verdict.DONE:
            call.end, call.ended_by = seen.end, seen.begin.input if seen.begin else None
        return verdict

    # The engine's side

    def _new_id(self, call: Call) -> str:
        self._num_engine_requests += 1
        return f"{call.correlation_id}#{self._num_engine_requests}"

    def _new_request(self, call: Call) -> Request:
        assert call.prompt is not None
        priority = call.tier.priority(call.headers.priority)
        return engine_request(
            self._new_id(call),
            call.asked(),
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

    def _start(self, call: Call, resumed: ReplyLog | None) -> EventStream:
        """Hands it to the engine, to go on after the tokens of `resumed`, with the seed of the call."""
        assert call.admitted is not None, "admission has not been asked"
        admitted, accepted = call.admitted, resumed.token_ids if resumed is not None else {}
        self._drop_engine_request(call)
        call.engine_id = self._new_id(call)
        request = replace(
            admitted,
            request_id=call.engine_id,
            sampling=sampling_params(call.asked(), call.seed, self._model.vocab_size),
            accepted=tuple(tuple(accepted.get(i, ())) for i in range(admitted.n)) if accepted else (),
        )
        call.num_resumed = sum(map(len, request.accepted))
        call.trace.waits(call.delivery.lane, admitted.priority)  # again, where another engine request had its seat
        call.trace.enters(call.asked(), call.correlation_id, admitted.n, admitted.max_tokens, call.num_resumed)
        observer = call.trace if call.trace.recorded else None
        stream = call.events = self._engine.add(request, partial(self._gate.started, admitted.request_id), observer)
        if self._is_cancelled(call):
            self._engine.cancel(call.engine_id, FinishReason.CANCELLED)
        return stream

    def _resume(self, call: Call, stream: EventStream | None, resumed: ReplyLog | None) -> EventStream:
        """Goes on where earlier attempts stopped, with the seed of the first (rule 2). `stream`: computed already."""
        seed = call.seed if resumed is None or resumed.first_begin is None else resumed.first_begin.seed
        if seed == call.seed and not (resumed and any(resumed.token_ids.values())):
            return stream or self._start(call, None)
        if (call.num_attempts == 1 or call.events is None) and call.admitted is not None:
            self._gate.waive(call.admitted)
        call.seed = seed
        return self._start(call, resumed)

    def _deadline(self, call: Call) -> float | None:
        deadline_ms = call.headers.deadline_ms
        if deadline_ms is None and call.tier.default_deadline_ms is not None:
            deadline_ms = call.delivery.source.timestamp_ms + call.tier.default_deadline_ms
        return None if deadline_ms is None else self._now() + (deadline_ms - self._wall_ms()) / 1000

    def _drop_engine_request(self, call: Call) -> None:
        if call.engine_id:
            self._engine.abort(call.engine_id)
            call.engine_id = ""
            call.trace.dropped()

    # Other topics

    async def _bury_for_good(self, delivery: Delivery, reason: DeadLetterReason, message: str) -> None:
        try:
            trace = self._telemetry.trace(delivery)
            self._telemetry.bind(delivery, trace)
            buried = await self._side.bury(delivery, trace, reason, message)
            if buried:
                self._sources[delivery.lane].done(delivery)
            self._telemetry.unanswerable(delivery, trace, reason, buried)
        except Exception:
            log.exception("request.abandoned", input=delivery.source.to_fields())
