"""A priority queue whose items may die inside it."""

import heapq
from collections.abc import Callable
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


class LazyHeap(Generic[ItemT]):
    """A heap with lazy deletion: dead items are dropped when they surface, or when they outnumber the living.

    So a death costs O(1) amortised, push and pop O(log n), and memory stays within twice the living.
    Items with equal keys leave in the order of their (unique) numbers.
    """

    __slots__ = ("_entries", "_is_live", "_num_live")

    def __init__(self, is_live: Callable[[ItemT], bool]) -> None:
        self._entries: list[tuple[tuple[float, ...], int, ItemT]] = []
        self._is_live = is_live
        self._num_live = 0

    def __len__(self) -> int:
        return self._num_live

    def push(self, key: tuple[float, ...], number: int, item: ItemT) -> None:
        heapq.heappush(self._entries, (key, number, item))
        self._num_live += 1

    def peek(self) -> ItemT | None:
        """The first living item, left where it is; None when there is none."""
        while self._entries and not self._is_live(self._entries[0][2]):
            heapq.heappop(self._entries)
        return self._entries[0][2] if self._entries else None

    def pop(self) -> ItemT:
        """Takes the first living item. Asserts that there is one."""
        item = self.peek()
        assert item is not None, "pop from an empty heap"
        heapq.heappop(self._entries)
        self._num_live -= 1
        return item

    def note_death(self) -> None:
        """One item that is still inside has just died."""
        self._num_live -= 1
        if len(self._entries) > 2 * self._num_live + 64:
            self._entries = [entry for entry in self._entries if self._is_live(entry[2])]
            heapq.heapify(self._entries)

    def count_live(self) -> int:
        """Counts the living, O(n): what len() must be."""
        return sum(self._is_live(item) for _, _, item in self._entries)
