"""A campaign of faults on Apache Kafka (bench/faults.py): a short one each time, a long one where time allows."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from bench.campaign import Campaign, Fault, Plan

# The seed draws one of each; a frozen worker alone takes longer than all of them.
QUICK = (Fault.KILL, Fault.TERM, Fault.BROKER, Fault.SLOW, Fault.CANCEL, Fault.EXPIRE)


async def outlive(plan: Plan, kafka_module: Any) -> None:
    with kafka_module.Cluster(nodes=plan.nodes) as cluster:
        campaign = Campaign(plan, cluster, importlib.import_module("reader"), lambda _: None)
        report = await campaign.run()
    assert report.verdict.passed, f"{report.verdict.faults}; replay: {plan.replay}; logs: {report.folder}"
    assert report.verdict.counts["resumed requests"] > 0
    assert len(report.struck) == plan.num_faults


@pytest.mark.kafka
@pytest.mark.shared
async def test_t15_t17_nothing_is_lost_in_a_short_campaign(kafka_module: Any, checks: Path):
    """Kill, drain, broker restart, slow replies, cancels and deadlines with forty requests in flight on three lanes."""
    plan = Plan(seed=204, num_faults=6, workers=2, in_flight=40, faults=QUICK, num_kinds=12)
    assert {fault for fault, _ in plan.strikes()} == set(QUICK)
    await outlive(plan, kafka_module)


@pytest.mark.kafka
@pytest.mark.shared
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("nodes", [1, 3])
async def test_soak(kafka_module: Any, checks: Path, nodes: int):
    """A hundred faults of every kind with three workers and two hundred requests in flight."""
    await outlive(Plan(seed=nodes, num_faults=100, nodes=nodes), kafka_module)
