"""A request that goes on from the tokens of an earlier attempt ends as if nothing had happened."""

import pytest

from schemas.reasons import FinishReason
from tests.engine.builders import EOS, Engine, ScriptedRunner, make_request
from worker.engine.outputs import SamplingParams, TokenEvent


def run_script(script: list[int], accepted: list[int], **fields: object) -> Engine:
    """Runs a request whose tokens are script, going on after accepted."""
    engine = Engine(lambda config: ScriptedRunner(config, script), max_num_batched_tokens=8)
    engine.add(make_request(accepted=(tuple(accepted),) if accepted else (), **fields))
    engine.run()
    return engine


SCRIPTS = {
    "characters of several bytes": (list("a€b😀c".encode()), {}),
    "a character cut by the end": (list("ab😀".encode()[:-1]), {}),
    "a stop string": ([*b"one </s> two", *b"  "], {"stop": ("</s>", "<x>")}),
    "a stop string that does not come": (list(b"a </s </"), {"stop": ("</s>",)}),
    "a stop string of several bytes": (list("a€😀 more".encode()), {"stop": ("€😀",)}),
    "EOS": ([65, 66, EOS], {}),
    "EOS after a held-back beginning": ([*b"ab<", EOS], {"stop": ("<x>",)}),
    "a stop token": ([65, 66, 67, 68], {"stop_token_ids": (67,)}),
    "one token": ([65], {}),
    "a stop string before min_tokens": (
        list(b"a</s>b</s>c"),
        {"stop": ("</s>",), "sampling": SamplingParams(min_tokens=8)},
    ),
    "EOS as soon as min_tokens allow": ([65, EOS, EOS, EOS, EOS], {"sampling": SamplingParams(min_tokens=3)}),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_cut_point_continues_identically(name: str) -> None:
    """Cut anywhere, in a character or a stop string: same tokens, same text per token, same end, nothing twice."""
    script, fields = SCRIPTS[name]
    whole = run_script(script, [], max_tokens=len(script), **fields)
    deliveries = [event for event in whole.events if isinstance(event, TokenEvent)]
    for cut in range(1, len(deliveries) + 1):
        rest = run_script(script, whole.tokens()[:cut], max_tokens=len(script), **fields)
        assert [event for event in rest.events if isinstance(event, TokenEvent)] == deliveries[cut:]
        assert rest.finish() == whole.finish()
        assert bool(rest.records) == (cut < len(deliveries)), "a complete choice takes no step"


def test_hashed_tokens_continue_identically() -> None:
    """The runner is given prompt and accepted tokens, chunked as any prompt, and goes on at the next position."""
    whole = Engine()
    whole.add(make_request(prompt=5, max_tokens=12))
    whole.run()
    for cut in range(1, 12):
        rest = Engine(max_num_batched_tokens=4)
        rest.add(make_request(prompt=5, max_tokens=12, accepted=(tuple(whole.tokens()[:cut]),)))
        rest.run()
        assert rest.tokens() == whole.tokens()[cut:]
        assert rest.records[0].num_prefill_tokens == 4
        assert sum(record.num_prefill_tokens for record in rest.records) == 5 + cut


def test_choices_resume_each_at_its_own_position() -> None:
    """One choice is complete, one goes on, one is fresh."""
    whole = Engine()
    whole.add(make_request(n=3))
    whole.run()
    tokens = [whole.tokens(choice=choice) for choice in range(3)]
    rest = Engine()
    rest.add(make_request(n=3, accepted=(tuple(tokens[0]), tuple(tokens[1][:3]), ())))
    assert rest.finish(choice=0).reason is FinishReason.LENGTH
    rest.run()
    assert [rest.tokens(choice=choice) for choice in range(3)] == [[], tokens[1][3:], tokens[2]]
    assert [rest.finish(choice=choice).reason for choice in range(3)] == [FinishReason.LENGTH] * 3


def test_a_request_found_complete_keeps_nothing() -> None:
    """All choices complete: their ends come at once and the engine is idle."""
    engine = Engine()
    engine.add(make_request(n=2, accepted=((65, EOS), (66, EOS)), deadline=5.0))
    assert [engine.finish(choice=choice).reason for choice in range(2)] == [FinishReason.STOP] * 2
    assert not engine.scheduler.has_work
    engine.run()
    assert engine.records == []


def test_cancel_of_a_resumed_request_before_its_first_step() -> None:
    """The text that the earlier attempt held back comes as tail."""
    engine = Engine()
    engine.add(make_request(accepted=(tuple(b"ok <"),), stop=("</s>",)))
    engine.cancel("r", FinishReason.CANCELLED)
    assert engine.finish().tail == "<"
    engine.run()


def test_resumed_requests_keep_their_age() -> None:
    """The original arrival puts a resumed request ahead of fresh ones of its priority."""
    engine = Engine(max_num_seqs=1)
    engine.add(make_request("fresh", arrival=9.0), make_request("resumed", arrival=1.0, accepted=((7, 8),)))
    record = engine.step()
    assert record is not None
    assert record.admitted == ("resumed",)
    engine.run()
