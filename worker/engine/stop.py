"""Stop strings: what may be shown, what must wait, where the text ends.

A choice must not show the beginning of a stop string, and must not hold back anything else. Each stop string has a
Knuth-Morris-Pratt automaton, whose state is the length of the longest suffix of the text that is a prefix of that stop.
So the longest suffix that could still become a stop is known at once, at a cost per character and stop, not per length.
"""


class StopMatcher:
    """Matches the text of one choice, fed token by token, against its stop strings.

    After each feed, everything emitted is the text so far without its longest suffix that is a proper prefix of some
    stop string. The first token whose text completes a stop ends the choice; the text is then cut where the earliest
    complete stop begins.
    """

    __slots__ = ("_failures", "_held", "_states", "_stops")

    def __init__(self, stops: tuple[str, ...]) -> None:
        assert all(stops), "a stop string is not empty"
        self._stops = stops
        # Failure tables, made as far as a text has come: a long stop string that does not occur costs nothing.
        self._failures = [[0, 0] for _ in stops]
        self._states = [0] * len(stops)
        self._held = ""

    def feed(self, text: str, may_end: bool = True) -> tuple[str, bool]:
        """Takes the text of the next token; returns (text that is now safe to show, a stop string is complete).

        After a match the matcher is at its end, with nothing held back: the stop and what follows are dropped.

        Args:
            may_end: False: a stop string that this text completes is ordinary text. What it leaves unfinished may
                still become one.
        """
        if not self._stops:
            return text, False
        pending = self._held + text
        cut = len(pending)
        matched = False
        for i in range(len(self._stops)):
            start = self._advance(i, text, may_end)
            if start is not None:
                matched = True
                cut = min(cut, len(self._held) + start)
        if matched:
            self._held = ""
            return pending[:cut], True
        cut -= max(self._states)
        self._held = pending[cut:]
        return pending[:cut], False

    def flush(self) -> str:
        """The text held back, which no further token can turn into a stop string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, i: int, text: str, may_end: bool) -> int | None:
        """Runs stop i's automaton over text; where its first match starts, relative to text (negative: before it)."""
        stop, failure, state = self._stops[i], self._failures[i], self._states[i]
        if not state and stop[0] not in text:
            return None
        for position, char in enumerate(text):
            while state and stop[state] != char:
                state = failure[state]
            if stop[state] == char:
                state += 1
                if state == len(failure):
                    failure.append(_next_failure(stop, failure))
            if state == len(stop):
                if may_end:
                    return position + 1 - state
                state = failure[state]
        self._states[i] = state
        return None


def _next_failure(stop: str, failure: list[int]) -> int:
    """The next entry of a failure table (Knuth, Morris, Pratt 1977), from those before, of which there are two or more.

    At k: how long the longest proper suffix of stop[:k] is that is also its prefix.
    """
    last = len(failure) - 1
    length = failure[last]
    while length and stop[length] != stop[last]:
        length = failure[length]
    return length + (stop[length] == stop[last])
