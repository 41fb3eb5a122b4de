"""Topic names and tiers."""

import pytest

from schemas.topics import DEFAULT_TIERS, LANES, Tier, control_topic, dlq_topic, is_valid_topic, lane_topic, reply_topic


def test_names_derive_from_their_prefixes() -> None:
    """Lanes, control and dead letters share the lane prefix; a reply topic is its prefix and the correlation id."""
    assert lane_topic("batch") == "prompts.batch"
    assert (control_topic("m."), dlq_topic("m.")) == ("m.control", "m.dlq")
    assert reply_topic("abc") == "replies.abc"
    assert tuple(DEFAULT_TIERS) == LANES


@pytest.mark.parametrize("name", ["", ".", "..", "a b", "a/b", "ä", "a" * 250, "a\n"])
def test_kafka_would_refuse_these_names(name: str) -> None:
    """Kafka's own rule: 1 to 249 of [A-Za-z0-9._-], not . or .."""
    assert not is_valid_topic(name)


def test_kafka_would_take_these_names() -> None:
    """The same rule from the other side."""
    assert all(is_valid_topic(name) for name in ("a", "...", "A-z_0.9", "a" * 249))


@pytest.mark.parametrize(("tier", "default", "cap"), [("interactive", 7, 9), ("standard", 4, 6), ("batch", 1, 3)])
def test_a_header_lowers_a_priority_and_never_lifts_it_above_the_cap(tier: str, default: int, cap: int) -> None:
    """Larger is more urgent; without a header the tier's default counts; above the cap the cap counts."""
    priority = DEFAULT_TIERS[tier].priority
    assert priority(None) == default
    assert [priority(header) for header in range(10)] == [min(header, cap) for header in range(10)]


@pytest.mark.parametrize(
    "wrong", [{"name": "dlq"}, {"name": "a b"}, {"default_priority": 8}, {"priority_cap": 10}, {"flush_ms": -1.0}]
)
def test_a_tier_that_cannot_work_is_refused(wrong: dict[str, object]) -> None:
    """A reserved name, a default above the cap and a negative interval raise ValueError."""
    fields: dict[str, object] = {"name": "x", "default_priority": 4, "priority_cap": 6, **wrong}
    with pytest.raises(ValueError):
        Tier(**fields)  # type: ignore[arg-type]


def test_requests_of_a_tier_flush_together() -> None:
    """Whenever they begin, at most a period later, and never at once; a tier without a period collects nothing."""
    tier = Tier("x", default_priority=4, priority_cap=6, flush_ms=50.0)
    flushes = {now: tier.next_flush(now) for now in (100.01, 100.049, 100.051)}
    assert flushes[100.01] == flushes[100.049] == pytest.approx(100.05)
    assert flushes[100.051] == pytest.approx(100.1)
    assert all(flush is not None and 0 < flush - now <= 0.0501 for now, flush in flushes.items())
    assert Tier("x", default_priority=4, priority_cap=6).next_flush(100.0) is None
