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
        self._failures = [_failure_table(stop) for stop in stops]
        self._states = [0] * len(stops)
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Takes the text of the next token; returns (text that is now safe to show, a stop string is complete).

        After a match the matcher is at its end, with nothing held back: the stop and what follows are dropped.
        """
        if not self._stops:
            return text, False
        pending = self._held + text
        cut = len(pending)
        matched = False
        for i in range(len(self._stops)):
            start = self._advance(i, text)
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

    def _advance(self, i: int, text: str) -> int | None:
        """Runs stop i's automaton over text; where its first match starts, relative to text (negative: before it)."""
        stop, failure, state = self._stops[i], self._failures[i], self._states[i]
        for position, char in enumerate(text):
            while state and stop[state] != char:
                state = failure[state]
            if stop[state] == char:
                state += 1
            if state == len(stop):
                return position + 1 - state
        self._states[i] = state
        return None


def _failure_table(stop: str) -> list[int]:
    """At k: how long the longest proper suffix of stop[:k] is that is also its prefix (Knuth, Morris, Pratt 1977)."""
    failure = [0] * (len(stop) + 1)
    length = 0
    for k in range(1, len(stop)):
        while length and stop[length] != stop[k]:
            length = failure[length]
        if stop[length] == stop[k]:
            length += 1
        failure[k + 1] = length
    return failure
