"""What a worker commits beside an offset: which records above it are open, the others being done (protocol.md 6).

Ascending offsets as differences in base 36. Not part of the wire contract; workers and `carousel status` share it.
A worker commits one with every offset, also where all is done: a commit without tells that this broker keeps none.
Standard library only.
"""

from collections.abc import Iterator, Sequence

_VERSION = "1:"
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def encode_done_map(position: int, offsets: Sequence[int]) -> str:
    """The commit's metadata.

    Args:
        position: the committed offset.
        offsets: the open ones from `position` on, ascending, and last the one below which all is known.
    """
    numbers = []
    for offset in offsets:
        if offset > position:  # `position` itself is the commit, so it is left out
            numbers.append(_base36(offset - position))
            position = offset
    return _VERSION + ",".join(numbers)


def decode_done_map(position: int, metadata: str) -> list[int]:
    """The offsets that `encode_done_map` was given, or [] when there are none or they make no sense."""
    if not metadata.startswith(_VERSION):
        return []
    try:
        return [position, *_running_sums(position, [int(n, 36) for n in metadata[len(_VERSION) :].split(",")])]
    except ValueError:
        return []


def _running_sums(total: int, steps: list[int]) -> Iterator[int]:
    for step in steps:
        if step <= 0:
            raise ValueError("offsets ascend")
        total += step
        yield total


def _base36(n: int) -> str:
    digits = ""
    while n:
        n, d = divmod(n, 36)
        digits = _DIGITS[d] + digits
    return digits
