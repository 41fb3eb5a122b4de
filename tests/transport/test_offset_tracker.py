"""The offset tracker against a naive model, and its traps one by one."""

from hypothesis import given
from hypothesis import strategies as st

from worker.transport.offset_tracker import MAX_METADATA_CHARS, OffsetTracker, Seen


def take_in(tracker: OffsetTracker, *offsets: int) -> None:
    for offset in offsets:
        assert tracker.see(offset) is Seen.NEW


def test_commits_only_the_contiguous_prefix():
    """A finished request above an unfinished one does not move the commit position (faust#682)."""
    tracker = OffsetTracker(10)
    take_in(tracker, 10, 11, 12)
    tracker.done(12)
    tracker.done(11)
    assert tracker.position == 10
    tracker.done(10)
    assert tracker.position == 13
    assert tracker.metadata == "1:", "a map, with nothing in it: a commit without one is of a broker that keeps none"


def test_inherited_is_what_was_there_before():
    """Records below the end of the log when the ownership began may have been begun by an earlier owner."""
    tracker = OffsetTracker(3, log_end=5)
    assert [tracker.is_inherited(offset) for offset in (3, 4, 5, 6)] == [True, True, False, False]
    assert not OffsetTracker(3).is_inherited(3)


def test_offset_zero_is_an_offset():
    """A partition that begins at 0 commits 0 until its first record is done (aiokafka#1008)."""
    tracker = OffsetTracker(0)
    take_in(tracker, 0)
    assert tracker.position == 0
    tracker.done(0)
    assert tracker.position == 1


def test_a_hole_is_fetched_again_before_it_is_believed():
    """A record above the expected one is refused once: it may be a record that a re-balance swallowed."""
    tracker = OffsetTracker(5)
    assert tracker.see(7) is Seen.HOLE
    assert tracker.expected == 5
    take_in(tracker, 5, 6, 7)
    assert tracker.see(9) is Seen.HOLE
    assert tracker.see(9) is Seen.NEW  # twice the same: compaction, or a transaction marker
    assert tracker.expected == 10


def test_two_different_holes_are_each_fetched_again():
    """Believing needs the same hole twice in a row."""
    tracker = OffsetTracker(0)
    assert tracker.see(3) is Seen.HOLE
    assert tracker.see(2) is Seen.HOLE
    assert tracker.see(3) is Seen.HOLE
    assert tracker.see(3) is Seen.NEW


def test_a_new_owner_skips_what_is_done():
    """The commit's metadata names the done records above the position."""
    tracker = OffsetTracker(100)
    take_in(tracker, *range(100, 108))
    for offset in (101, 103, 104, 107):
        tracker.done(offset)
    heir = OffsetTracker(tracker.position, tracker.metadata)
    seen = [heir.see(offset) for offset in range(100, 109)]
    assert [s is Seen.DONE for s in seen] == [o in (101, 103, 104, 107) for o in range(100, 109)]
    assert heir.num_outstanding == 5


def test_an_heir_hands_on_what_it_has_not_read_yet():
    """A second hand-over before the map's records arrived again loses nothing of the map."""
    tracker = OffsetTracker(0)
    take_in(tracker, *range(6))
    tracker.done(1)
    tracker.done(4)
    first = OffsetTracker(tracker.position, tracker.metadata)
    take_in(first, 0)
    first.done(0)
    second = OffsetTracker(first.position, first.metadata)
    assert [second.see(o) for o in range(2, 6)] == [Seen.NEW, Seen.NEW, Seen.DONE, Seen.NEW]


def test_unreadable_metadata_counts_as_none():
    """Metadata of somebody else, or of a future version, costs a look-up and nothing else."""
    for metadata in ("", "2:abc", "1:", "1:x!", "1:0", "1:-1", "hello"):
        tracker = OffsetTracker(3, metadata)
        assert tracker.position == 3
        assert tracker.see(3) is Seen.NEW


def test_a_full_map_is_noticed_before_the_broker_refuses_it():
    """Every second request unfinished, far apart: the metadata stays within the broker's limit."""
    tracker, offset = OffsetTracker(0), 0
    while not tracker.is_full:
        tracker.see(offset)
        tracker.see(offset)  # holes of a compacted log make the differences long
        offset += 100_003
    assert MAX_METADATA_CHARS - 40 <= len(tracker.metadata) <= MAX_METADATA_CHARS


def test_metadata_of_512_outstanding_fits():
    """The largest permitted number of outstanding records, each with a done one behind it, is not full."""
    tracker = OffsetTracker(10**12)
    for offset in range(10**12, 10**12 + 1024):
        tracker.see(offset)
        if offset % 2:
            tracker.done(offset)
    assert tracker.num_outstanding == 512
    assert not tracker.is_full


@given(st.data())
def test_agrees_with_a_naive_model(data: st.DataObject):
    """Over random arrivals, holes, completions and hand-overs: position, skips and counts are those of plain sets."""
    existing = sorted(data.draw(st.sets(st.integers(0, 40), min_size=1)))
    tracker, done, outstanding = OffsetTracker(0), set(), set()
    cursor = 0
    for _ in range(data.draw(st.integers(1, 60))):
        action = data.draw(st.sampled_from(["fetch", "done", "hand over"]))
        if action == "fetch" and cursor < len(existing):
            offset = existing[cursor]
            seen = tracker.see(offset)
            if seen is Seen.HOLE:
                assert offset > tracker.expected
                seen = tracker.see(offset)
            assert seen is (Seen.DONE if offset in done else Seen.NEW)
            if seen is Seen.NEW:
                outstanding.add(offset)
            cursor += 1
        elif action == "done" and outstanding:
            offset = data.draw(st.sampled_from(sorted(outstanding)))
            tracker.done(offset)
            outstanding.remove(offset)
            done.add(offset)
        elif action == "hand over":
            position, metadata = tracker.position, tracker.metadata
            assert all(o in done for o in existing if o < position), "an unfinished record was committed past"
            tracker, outstanding = OffsetTracker(position, metadata), set()
            cursor = next((i for i, o in enumerate(existing) if o >= position), len(existing))
        assert tracker.num_outstanding == len(outstanding)
        assert len(tracker.metadata) <= MAX_METADATA_CHARS
