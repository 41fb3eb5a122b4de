"""A priority queue whose items may leave from the middle."""

import heapq
from collections.abc import Callable
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


class LazyHeap(Generic[ItemT]):
    """A heap with lazy deletion: an item that no longer belongs is dropped when it surfaces or when such pile up.

    So leaving costs O(1) amortised, push and peek O(log n), and memory stays within a constant of twice what belongs.
    An item that has left never belongs again.
    """

    __slots__ = ("_belongs", "_entries", "_num_items")

    def __init__(self, belongs: Callable[[ItemT], bool]) -> None:
        self._belongs = belongs
        self._entries: list[tuple[tuple[float, ...], int, ItemT]] = []
        self._num_items = 0

    def __len__(self) -> int:
        return self._num_items

    def push(self, key: tuple[float, ...], number: int, item: ItemT) -> None:
        """Takes in an item. Smallest key first; among equal keys, smallest number, which is unique."""
        heapq.heappush(self._entries, (key, number, item))
        self._num_items += 1

    def peek(self) -> ItemT | None:
        """The first item, left where it is; None when there is none."""
        while self._entries and not self._belongs(self._entries[0][2]):
            heapq.heappop(self._entries)
        return self._entries[0][2] if self._entries else None

    def note_left(self) -> None:
        """An item inside has just stopped belonging."""
        self._num_items -= 1
        if len(self._entries) > 2 * self._num_items + 64:
            self._entries = [entry for entry in self._entries if self._belongs(entry[2])]
            heapq.heapify(self._entries)

    def recount(self) -> int:
        """What len() must be, counted in O(n)."""
        return sum(self._belongs(item) for _, _, item in self._entries)
