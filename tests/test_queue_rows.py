"""What went wrong in other systems that serve from Kafka (research/queue.md 3.4): each row, and the tests that hold it.

Most tests carry their row's number in their name; a few are about more than one thing and keep theirs.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent

ROWS: dict[str, tuple[str, ...]] = {
    "T1": (
        "contract/test_lanes.py::test_t01_a_blocked_event_loop",
        "worker/test_recovery.py::test_t01_a_long_step_leaves_the_event_loop_alone",
    ),
    "T2": (
        "contract/test_lanes.py::test_t02_commits_that_fail",
        "transport/test_kafka_lane.py::test_t02_a_failed_commit_is_tried_again",
    ),
    "T3": (
        "contract/test_lanes.py::test_t03_brokers_that_go_away_and_come_back",
        "transport/test_kafka_lane.py::test_t03_polls_are_recorded",
        "e2e/test_survival.py::test_apache_kafka_restarts_under_load",
        "worker/test_health.py::test_t03_a_lane_that_is_polled_no_more_turns_livez_red",
    ),
    "T4": (
        "contract/test_lanes.py::test_t04_a_fetching_task_that_ends_shows_as_lag",
        "contract/test_lanes.py::test_t04_a_lane_that_fetches_no_more_is_replaced",
        "transport/test_kafka_lane.py::test_t04_a_fetching_task_that_ends_is_noticed",
        "schemas/test_log_consumer.py::test_a_task_that_has_ended_is_noticed",
        "service/test_client.py::test_death_of_the_fetching_task_is_noticed",
    ),
    "T5": ("transport/test_kafka_lane.py::test_t05_no_commit_between_revocation_and_assignment",),
    "T6": (
        "transport/test_kafka_lane.py::test_t06_an_evicted_member_starts_from_the_commit",
        "transport/test_kafka_connections.py::test_t06_an_answer_that_failed_as_a_whole_is_no_group_without_commits",
        "test_tidy.py::test_offsets_are_committed_explicitly",
    ),
    "T7": (
        "contract/test_lanes.py::test_t07_what_is_not_done_comes_again",
        "transport/test_kafka_lane.py::test_t07_what_failed_is_not_committed_past",
    ),
    "T8": (
        "transport/test_kafka_lane.py::test_t08_a_committed_0_is_an_offset",
        "transport/test_offset_tracker.py::test_offset_zero_is_an_offset",
    ),
    "T9": (
        "contract/test_lanes.py::test_t09_a_poll_that_is_cut_off_loses_nothing",
        "contract/test_replies.py::test_t09_readers_outlive_cancelled_reads",
        "contract/test_replies.py::test_t09_a_send_whose_sender_is_cancelled_lands",
        "test_queue_rows.py::test_t09_polls_have_no_other_time_out",
        "transport/test_kafka_replies.py::test_t09_a_producer_that_cannot_go_on_is_replaced",
        "transport/test_kafka_replies.py::test_a_topic_with_a_record_on_its_way_is_not_forgotten",
        "service/test_faults.py::test_broker_that_does_not_come_back",
    ),
    "T10": ("service/test_topics.py::test_t10_creation_waits_for_a_cluster_that_changes",),
    "T11": ("transport/test_kafka_connections.py::test_t11_lanes_have_no_static_membership",),
    "T12": ("transport/test_kafka_lane.py::test_t12_a_slow_commit_holds_nothing_up",),
    "T13": ("worker/test_recovery.py::test_t13_a_cancelled_task_never_counts_as_done",),
    "T14": ("transport/test_kafka_lane.py::test_t14_closing_commits_what_is_done_and_no_more",),
    "T15": (
        "e2e/test_faults.py::test_t15_t17_nothing_is_lost_in_a_short_campaign",
        "worker/test_recovery.py::test_t15_a_killed_worker_is_taken_over_in_the_middle",
        "worker/test_recovery.py::test_t15_an_end_that_was_written_but_not_marked_done",
    ),
    "T16": (
        "transport/test_kafka_lane.py::test_t16_what_is_done_during_the_last_commit_is_committed_too",
        "e2e/test_survival.py::test_drain_hands_over_what_does_not_fit",
    ),
    "T17": (
        "e2e/test_faults.py::test_t15_t17_nothing_is_lost_in_a_short_campaign",
        "contract/test_lanes.py::test_t17_a_second_worker_joins_and_leaves",
        "transport/test_kafka_lane.py::test_t17_a_partition_that_comes_back_keeps_what_runs",
    ),
    "T19": (
        "transport/test_kafka_replies.py::test_t19_a_record_too_large_is_not_sent",
        "transport/test_kafka_replies.py::test_t19_a_dead_letter_of_large_headers_is_cut",
        "transport/test_kafka_replies.py::test_t19_a_dead_letter_of_a_large_key_has_none",
        "e2e/test_poison.py::test_poison_disturbs_nobody",
    ),
    "T20": (
        "contract/test_replies.py::test_t20_a_topic_deleted_under_its_writer",
        "transport/test_kafka_replies.py::test_t20_a_topic_that_is_deleted_ends_its_send",
        "service/test_faults.py::test_t20_somebody_else_deletes_the_reply_topic",
        "service/test_client.py::test_missing_lane",
    ),
    "T21": (
        "transport/test_kafka_lane.py::test_t21_a_gap_in_the_log_is_passed",
        "transport/test_kafka_lane.py::test_t21_records_swallowed_by_a_rebalance_are_fetched_again",
        "transport/test_offset_tracker.py::test_agrees_with_a_naive_model",
    ),
    "T22": ("transport/test_kafka_lane.py::test_t22_a_stale_acknowledgement_changes_nothing",),
    "T23": ("worker/test_recovery.py::test_t23_a_transient_failure_is_retried_in_place",),
    "T24": (
        "service/test_client.py::test_timeout_without_an_event",
        "service/test_client.py::test_deadline_without_an_answer",
        "worker/test_server.py::test_shared_log_restarts_and_is_read_back",
    ),
    "T25": (
        "transport/test_kafka_lane.py::test_t25_pauses_are_applied_again_after_a_rebalance",
        "transport/test_kafka_lane.py::test_t25_bytes_are_bounded_too",
        "transport/test_kafka_lane.py::test_t25_all_of_a_record_counts",
    ),
    "T26": ("transport/test_kafka_lane.py::test_t26_only_the_contiguous_prefix_is_committed",),
    "T27": ("transport/test_kafka_lane.py::test_t27_commit_of_a_lost_partition",),
    "T28": (
        "transport/test_offset_tracker.py::test_a_full_map_is_noticed_before_the_broker_refuses_it",
        "transport/test_offset_tracker.py::test_metadata_of_512_outstanding_fits",
    ),
    "T29": (
        "contract/test_replies.py::test_t29_the_producer_keeps_no_ended_topics",
        "contract/test_replies.py::test_t29_a_log_goes_on_under_another_producer",
        "transport/test_kafka_replies.py::test_t29_an_ended_topic_is_forgotten",
        "transport/test_kafka_connections.py::test_t29_what_a_producer_remembers_is_bounded",
        "transport/test_kafka_connections.py::test_t29_a_broker_that_creates_topics_is_warned_of",
    ),
    "T30": (
        "service/test_reply_topics.py::test_t30_no_topic_is_handed_out_before_it_has_a_leader",
        "service/test_topics.py::test_t30_new_topics_are_waited_for_until_each_has_a_leader",
        "service/test_reply_topics.py::test_demand_is_coalesced",
        "service/test_reply_topics.py::test_refills_and_grows",
        "service/test_reply_topics.py::test_ready_ahead_of_need",
    ),
    "T31": ("transport/test_kafka_connections.py::test_t31_reply_logs_are_read_without_a_group",),
    "T32": (
        "worker/test_recovery.py::test_t32_a_deadline_is_never_moved",
        "worker/test_recovery.py::test_t32_nothing_stays_reserved_however_requests_end",
        "worker/test_admission.py::test_nothing_is_held_after_any_way_to_end",
    ),
    "T33": ("worker/test_recovery.py::test_t33_positions_are_numbers",),
    "T34": (
        "worker/test_recovery.py::test_t34_a_drain_that_outlasts_a_rebalance_is_refused",
        "worker/test_cli.py::test_what_cannot_be_is_said_before_anything_starts",
    ),
    "T35": (
        "worker/test_metrics.py::test_t35_depth_and_oldest_age_are_what_to_scale_on",
        "transport/test_kafka_lane.py::test_lag_and_gap_of_a_partition",
        "e2e/test_telemetry.py::test_every_documented_metric_is_there",
    ),
    "T36": (
        "worker/test_recovery.py::test_t36_one_traceparent_on_every_record_that_is_passed_on",
        "schemas/test_records.py::test_t36_dead_letters_have_exactly_one_traceparent",
        "worker/test_tracing.py::test_t36_a_dead_letter_has_one_traceparent",
    ),
}
NOT_OURS = {
    "T18": "there is no gateway yet; the client publishes only when it reads the reply topic already (T30)",
}


@cache
def names_in(path: str) -> frozenset[str]:
    tree = ast.parse((TESTS / path).read_text())
    return frozenset(n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def test_every_row_is_covered():
    """All 36 rows are here: with tests, or with the reason why not."""
    assert set(ROWS) | set(NOT_OURS) == {f"T{number}" for number in range(1, 37)}
    assert not set(ROWS) & set(NOT_OURS)
    assert all(NOT_OURS.values())


@pytest.mark.parametrize("row", ROWS)
def test_the_tests_of_a_row_exist(row: str):
    """Every test that is named is there."""
    for name in ROWS[row]:
        path, _, test = name.partition("::")
        assert test in names_in(path), f"{row}: no test {name}"


def test_numbered_tests_are_listed():
    """A test with a row's number in its name stands in that row."""
    for path in {name.partition("::")[0] for names in ROWS.values() for name in names}:
        for test in names_in(path):
            for part in test.split("_"):
                if len(part) == 3 and part[0] == "t" and part[1:].isdigit():
                    assert f"{path}::{test}" in ROWS[f"T{int(part[1:])}"]


def test_t09_polls_have_no_other_time_out():
    """A cancelled `getmany` leaks a count in aiokafka 0.14, so nothing here gives it another time-out than its own.
    What comes of one that is cut off, the contract tests say."""
    for package in ("worker", "service"):
        for file in (TESTS.parent / package).rglob("*.py"):
            tree = ast.parse(file.read_text())
            awaited = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Await)}
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "getmany":
                    assert id(node) in awaited, f"{file.name}:{node.lineno}"
                    assert any(keyword.arg == "timeout_ms" for keyword in node.keywords), f"{file.name}:{node.lineno}"
