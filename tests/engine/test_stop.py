"""Stop strings: least hold-back, earliest cut. The rows are those of issues that other engines had."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.reasons import FinishReason
from tests.engine.builders import EOS, Engine, ScriptedRunner, make_request
from worker.engine.fakes import ByteDetokenizer
from worker.engine.outputs import SamplingParams
from worker.engine.request import Sequence
from worker.engine.stop import StopMatcher


def feed_all(matcher: StopMatcher, pieces: list[str]) -> tuple[list[str], bool]:
    """What each piece let out, until a stop string is complete."""
    out = []
    for piece in pieces:
        text, matched = matcher.feed(piece)
        out.append(text)
        if matched:
            return out, True
    return out, False


@pytest.mark.parametrize(
    ("stops", "pieces", "out", "matched"),
    [
        ((), ["ab", "c"], ["ab", "c"], False),
        (("END",), ["x", "E", "N", "D"], ["x", "", "", ""], True),
        (("END",), ["xEN", "Ey"], ["x", "ENEy"], False),  # held back, then let go
        (("END",), ["xEN", "EN", "D"], ["x", "EN", ""], True),  # the hold moves on to the later beginning
        (("END",), ["one END two"], ["one "], True),
        (("aab",), ["aa", "ab"], ["", "a"], True),  # overlap of a stop with itself
        (("ab", "abc"), ["xa", "b"], ["x", ""], True),  # a stop that begins another
        (("abc", "ab"), ["xabc"], ["x"], True),
        (("bc", "abcd"), ["abcd"], [""], True),  # the earliest beginning cuts, not the earliest end
        (("bc", "abcd"), ["ab", "c"], ["", "a"], True),
        (("\n\n", "User:"), ["hi\n", "Us", "\n", "\n"], ["hi", "\n", "Us", ""], True),
        (("é",), ["caf", "é"], ["caf", ""], True),
    ],
)
def test_cases(stops: tuple[str, ...], pieces: list[str], out: list[str], matched: bool) -> None:
    """Each piece lets out what can no longer become a stop string; a complete one ends it."""
    assert feed_all(StopMatcher(stops), pieces) == (out, matched)


def test_flush_gives_what_was_held_back_once() -> None:
    """At an end without a match the beginning of a stop string is ordinary text."""
    matcher = StopMatcher(("END",))
    assert matcher.feed("the EN") == ("the ", False)
    assert matcher.flush() == "EN"
    assert matcher.flush() == ""


def test_an_empty_stop_string_is_refused() -> None:
    """An empty stop would match everywhere; the edge has refused it."""
    with pytest.raises(AssertionError):
        StopMatcher(("a", ""))


def held_back(text: str, stops: list[str]) -> int:
    """The definition: how long the longest suffix of text is that is a proper prefix of a stop."""
    return max((k for stop in stops for k in range(len(stop)) if text.endswith(stop[:k])), default=0)


@settings(max_examples=300, deadline=None)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
)
def test_equals_the_definition(stops: list[str], pieces: list[str]) -> None:
    """After every piece exactly the text that the definition allows is out; the cut is the earliest match."""
    matcher = StopMatcher(tuple(stops))
    text = shown = ""
    for piece in pieces:
        text += piece
        out, matched = matcher.feed(piece)
        shown += out
        starts = [text.find(stop) for stop in stops if stop in text]
        assert matched == bool(starts)
        if matched:
            assert shown == text[: min(starts)]
            return
        assert shown == text[: len(text) - held_back(text, stops)]
    assert shown + matcher.flush() == text


@settings(max_examples=300, deadline=None)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
    num_early=st.integers(0, 8),
)
def test_equals_the_definition_where_early_stops_do_not_count(
    stops: list[str], pieces: list[str], num_early: int
) -> None:
    """A stop that the first pieces complete is text like any other; one that they only begin still cuts."""
    matcher = StopMatcher(tuple(stops))
    text = shown = ""
    num_early_chars = len("".join(pieces[:num_early]))
    for i, piece in enumerate(pieces):
        text += piece
        out, matched = matcher.feed(piece, may_end=i >= num_early)
        shown += out
        starts = [
            start
            for stop in stops
            for start in range(len(text) - len(stop) + 1)
            if text.startswith(stop, start) and start + len(stop) > num_early_chars
        ]
        assert matched == (i >= num_early and bool(starts))
        if matched:
            assert shown == text[: min(starts)]
            return
        assert shown == text[: len(text) - held_back(text, stops)]
    assert shown + matcher.flush() == text


@settings(max_examples=200, deadline=None)
@given(
    stops=st.lists(st.text("aé€", min_size=1, max_size=3), min_size=1, max_size=3),
    text=st.text("aé€😀", max_size=12),
    cuts=st.lists(st.integers(0, 48), max_size=10),
)
def test_cut_anywhere_in_its_bytes_a_text_ends_where_it_should(stops: list[str], text: str, cuts: list[int]) -> None:
    """Tokens of any bytes, through detokeniser and matcher: shown is all whole characters but the ambiguous end."""
    data, detokenizer, matcher = text.encode(), ByteDetokenizer(), StopMatcher(tuple(stops))
    bounds = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    shown = ""
    for start, end in pairwise(bounds):
        piece = "".join(map(detokenizer.feed, data[start:end]))
        out, matched = matcher.feed(piece)
        shown += out
        whole = data[:end].decode(errors="ignore")
        starts = [whole.find(stop) for stop in stops if stop in whole]
        assert matched == bool(starts)
        if matched:
            assert shown == whole[: min(starts)]
            return
        assert shown == whole[: len(whole) - held_back(whole, stops)]
    assert shown + matcher.flush() == text


def test_a_long_stop_string_costs_what_of_it_occurs() -> None:
    """A million characters of stop string are not looked at before the text comes near them."""
    matcher = StopMatcher(("ab" * 500_000,))
    assert matcher.feed("plain text, abab and ")[0] == "plain text, abab and "
    assert len(matcher._failures[0]) < 10


def generate(text: str, **fields: object) -> Engine:
    """An engine that has generated the bytes of text, one a token."""
    script = text.encode()
    engine = Engine(lambda config: ScriptedRunner(config, script))
    engine.add(make_request(max_tokens=len(script), **fields))
    engine.run()
    return engine


def test_row_27_partial_utf8_is_held_and_deltas_sum_to_the_text() -> None:
    """A character comes out with its last byte, and all deltas together are the decoded text."""
    text = "a€😀é"
    engine = generate(text)
    assert engine.text() == text
    assert [event.text for event in engine.events[:4]] == ["a", "", "", "€"]


def test_row_27_an_incomplete_character_becomes_a_replacement_only_at_the_end() -> None:
    """A choice cut inside a character shows U+FFFD with its last token, not before."""
    engine = Engine(lambda config: ScriptedRunner(config, "a😀".encode()))
    engine.add(make_request(max_tokens=4))
    engine.run()
    assert [event.text for event in engine.events[:4]] == ["a", "", "", "�"]
    assert engine.finish().reason is FinishReason.LENGTH


def test_row_27_invalid_bytes_do_not_stop_the_engine() -> None:
    """Bytes that are no UTF-8 become U+FFFD; the text goes on."""
    detokenizer = ByteDetokenizer()
    text = "".join(detokenizer.feed(byte) for byte in b"\xff\xc3\x28ok") + detokenizer.flush()
    assert text == b"\xff\xc3\x28ok".decode(errors="replace")


def test_row_28_a_stop_split_over_tokens_leaks_no_prefix() -> None:
    """No part of a stop string is shown; its tokens are delivered; nothing is generated after it."""
    engine = generate("ok</s>more", stop=("</s>",))
    assert engine.text() == "ok"
    assert bytes(engine.tokens()) == b"ok</s>"
    assert engine.finish().reason is FinishReason.STOP


def test_row_28_the_tail_is_not_lost_at_the_end() -> None:
    """A beginning of a stop string that stays one is shown when the choice ends."""
    engine = generate("ok</", stop=("</s>",))
    assert engine.text() == "ok</"
    assert engine.finish().reason is FinishReason.LENGTH
    assert engine.finish().tail == ""  # the last token carried it


def test_row_29_only_the_ambiguous_suffix_is_held() -> None:
    """A long stop string delays nothing that cannot be its beginning."""
    engine = generate("plain text", stop=("<a very long stop string>",))
    assert [event.text for event in engine.events[:10]] == list("plain text")


def generate_tokens(script: list[int], **fields: object) -> Engine:
    engine = Engine(lambda config: ScriptedRunner(config, script))
    engine.add(make_request(**{"max_tokens": len(script), **fields}))
    engine.run()
    return engine


@pytest.mark.parametrize(
    ("min_tokens", "num_tokens"), [(0, 4), (1, 4), (3, 4), (4, 4), (5, 8), (8, 8), (9, 10), (99, 10)]
)
def test_row_30_a_stop_string_counts_from_min_tokens_on(min_tokens: int, num_tokens: int) -> None:
    """The token that completes the stop is the first that may end the choice; earlier stops are shown as text."""
    engine = generate_tokens(list(b"a</>b</>cd"), sampling=SamplingParams(min_tokens=min_tokens), stop=("</>",))
    assert len(engine.tokens()) == num_tokens
    assert engine.text() == {4: "a", 8: "a</>b", 10: "a</>b</>cd"}[num_tokens]
    assert engine.finish().reason is (FinishReason.LENGTH if num_tokens == 10 else FinishReason.STOP)


def test_row_30_a_stop_begun_before_min_tokens_and_completed_after_cuts() -> None:
    """Its beginning is held back, so nothing of it was shown."""
    engine = generate_tokens(list(b"ab</>c"), sampling=SamplingParams(min_tokens=5), stop=("</>",))
    assert (engine.text(), len(engine.tokens())) == ("ab", 5)


@pytest.mark.parametrize("end", [EOS, EOS + 1, 67])
@pytest.mark.parametrize("min_tokens", [0, 2, 3])
def test_row_30_no_end_token_is_drawn_before_min_tokens(end: int, min_tokens: int) -> None:
    """Each EOS of several, and a stop token: the runner gives another one until so many are generated."""
    script = [65, end, end, end, 66]
    engine = Engine(lambda config: ScriptedRunner(config, script))
    engine.add(
        make_request(
            max_tokens=5,
            eos_token_ids=(EOS, EOS + 1),
            stop_token_ids=(67,),
            sampling=SamplingParams(min_tokens=min_tokens),
        )
    )
    engine.run()
    num_tokens = max(min_tokens, 1) + 1
    assert len(engine.tokens()) == num_tokens
    assert engine.tokens().index(end) == num_tokens - 1
    assert engine.finish().reason is FinishReason.STOP


def test_row_30_an_end_token_that_comes_too_early_ends_nothing() -> None:
    """Whatever a runner gives: the finish rule holds by itself."""
    seq = Sequence(0, make_request(sampling=SamplingParams(min_tokens=2), stop_token_ids=(66,)), 0)
    assert seq.append(EOS) == ("", None)
    assert seq.append(66) == ("", FinishReason.STOP)


def test_row_30_min_tokens_above_max_tokens_is_length() -> None:
    """max_tokens ends a choice whatever min_tokens says."""
    engine = generate_tokens([65, EOS, EOS], max_tokens=3, sampling=SamplingParams(min_tokens=10))
    assert (len(engine.tokens()), engine.finish().reason) == (3, FinishReason.LENGTH)


def test_row_30_an_ignored_eos_does_not_end_a_choice_after_min_tokens() -> None:
    """ignore_eos goes on beyond min_tokens; a stop token does not."""
    fields = {"sampling": SamplingParams(min_tokens=2), "ignore_eos": True, "stop_token_ids": (67,)}
    engine = generate_tokens([65, 66, EOS, 67, 68], **fields)
    assert (engine.tokens(), engine.finish().reason) == ([65, 66, EOS, 67], FinishReason.STOP)
