"""Turns there and back: a machine that slows down or speeds up does so for all that is compared."""

import pytest

from bench.turns import palindromes


def test_there_and_back():
    """All variants forth and back, and the next palindrome begins with the next one."""
    assert palindromes("ABC", 2) == list("ABCCBA" + "BCAACB")


@pytest.mark.parametrize("variants", ["AB", "ABC", "ABCD"])
@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_linear_drift_cancels(variants: str, number: int):
    """Whatever a turn costs more by its place, summed over a round all variants have the same of it."""
    turns = palindromes(variants, number)
    cost = {variant: sum(place for place, turn in enumerate(turns) if turn == variant) for variant in variants}
    assert len(set(cost.values())) == 1, cost


@pytest.mark.parametrize("variants", ["AB", "ABC", "ABCD"])
def test_each_has_every_place(variants: str):
    """Over as many palindromes as variants, all are equally often first, second and so on of a palindrome."""
    size = 2 * len(variants)
    turns = palindromes(variants, len(variants))
    for place in range(size):
        assert sorted(turns[place::size]) == sorted(variants)
