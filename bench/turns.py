"""The order of what is compared by turns, so that a machine's slow drift falls on all alike."""

from collections.abc import Sequence
from typing import TypeVar

_T = TypeVar("_T")


def palindromes(variants: Sequence[_T], number: int) -> list[_T]:
    """The turns of a round: so many times all variants, there and back.

    There and back, all have the same mean place: a drift that is linear cancels. Each palindrome begins with the next
    variant, so that over as many palindromes as variants each also has every place: what is left is what changes
    within a palindrome and not with time.
    """
    turns: list[_T] = []
    for i in range(number):
        first = i % len(variants)
        order = [*variants[first:], *variants[:first]]
        turns += order + order[::-1]
    return turns
