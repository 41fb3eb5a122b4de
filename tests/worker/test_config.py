"""Tiers and tenants in the configuration, and on their way into the engine."""

from pathlib import Path

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from schemas.topics import Tier
from tests.engine.builders import make_request
from worker.cli import command
from worker.config import Tenant, WorkerConfig
from worker.engine.admission import Refuse, TierLimits
from worker.engine.policies import CompositeQueue
from worker.engine.request import Sequence
from worker.engine.step_model import StepCost, StepModel
from worker.engine.tiers import TenantPolicy, TierPolicy
from worker.levels import make_admission, make_queue, tier_policies

EXAMPLE = Path(__file__).parents[2] / "deploy" / "worker.example.toml"


def load(tmp_path: Path, text: str) -> WorkerConfig:
    path = tmp_path / "worker.toml"
    path.write_text(f'model = "tiny"\n{text}')
    return WorkerConfig(config=path)


def test_the_example_loads_and_means_what_it_says():
    """Each key reaches its place; who has no table gets the default tenant's terms."""
    config = WorkerConfig(config=EXAMPLE)
    assert list(config.lanes) == ["interactive", "standard", "batch", "acme"]
    assert config.tiers["interactive"].refuse_unreachable
    assert config.tiers["standard"].max_queued_tokens == 200_000
    assert config.tenants["acme"] == Tenant(None, 3.0, 8, 20.0, 5000.0)
    assert config.tiers_of("acme") == tuple(config.tiers)
    assert config.tiers_of("nightly") == ("batch",)
    assert config.tiers_of("somebody") == ("interactive", "standard", "batch")


def test_the_example_shows_every_key_of_a_tier_and_of_a_tenant():
    """It is the reference of the tables, so nothing may be missing from it."""
    text = EXAMPLE.read_text()
    missing = [name for kind in (Tier, Tenant) for name in kind.__dataclass_fields__ if f"\n{name} = " not in text]
    assert missing == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[tiers.gold]\nname='gold'\ndefault_priority=1\npriority_cap=2\nttft=3", "tiers.gold.ttft"),
        ("[tenants.acme]\nmax_runing = 3", "tenants.acme.max_runing"),
        ("[default_tenant]\ntokens = 3", "default_tenant.tokens"),
        ("[tenant.acme]", "tenant\n"),
        ("[tenants.acme]\ntiers = ['gold']", "[tenants.acme] names tiers that do not exist: gold"),
        ("[default_tenant]\ntiers = ['gold']", "[default_tenant] names tiers that do not exist: gold"),
        ("[tenants.acme]\nweight = 0", "tenants.acme.weight"),
        ("[tenants.acme]\nmax_running = 0", "tenants.acme.max_running"),
        ("[tenants.acme]\nrequests_per_s = 0", "tenants.acme.requests_per_s"),
        ("[tenants.acme]\ntokens_per_s = inf", "tenants.acme.tokens_per_s"),
        (f"[tenants.{'x' * 65}]", "at most 64"),
        ("quota_burst_seconds = 0", "quota_burst_seconds"),
        (
            "[tiers.a]\nname='a'\ndefault_priority=1\npriority_cap=2\ntenant='x'\n[tenants.x]\ntiers=[]",
            "[tiers.a] is the lane of 'x', who may not use it",
        ),
    ],
)
def test_what_cannot_be_meant_is_an_error_that_names_it(tmp_path: Path, text: str, words: str):
    """Unknown keys, unknown tiers, limits that let nothing in."""
    with pytest.raises(ValidationError) as error:
        load(tmp_path, text)
    assert words in str(error.value)


def test_the_command_line_says_which_table_is_wrong(tmp_path: Path):
    """In a sentence, with the table and the key."""
    path = tmp_path / "worker.toml"
    path.write_text('model = "tiny"\n[tenants.acme]\nmax_runing = 3')
    result = CliRunner().invoke(command, ["--config", str(path)])
    assert result.exit_code == 2
    assert "[tenants.acme] max_runing: there is no such setting" in result.output


def test_the_help_tells_of_tiers_and_tenants():
    """They have no flags, so it names the tables and the file that shows them."""
    words = " ".join(CliRunner().invoke(command, ["--help"], env={"COLUMNS": "200"}).output.split())
    for word in ("[tiers.NAME]", "[tenants.NAME]", "[default_tenant]", "worker.example.toml", "--quota-burst-seconds"):
        assert word in words


@pytest.mark.parametrize(
    "fields",
    [
        {"weight": 0.0},
        {"weight": float("inf")},
        {"weight": float("nan")},
        {"max_queued_tokens": 0},
        {"max_quota_delay_ms": -1.0},
        {"tenant": ""},
    ],
)
def test_a_tier_that_cannot_work_is_refused(fields: dict):
    """By the tier itself, so that tools which know no worker refuse it, too."""
    with pytest.raises(ValueError, match="tier 'gold' needs"):
        Tier("gold", default_priority=1, priority_cap=2, **fields)


def test_terms_reach_policy_and_admission():
    """Weights, seats, rates and bounds, in seconds; those of the default tenant for everybody else."""
    config = WorkerConfig(config=EXAMPLE)
    model = StepModel(prior=StepCost(0.0, 0.001, 0.0, 0.0))
    queue = make_queue(config, model)
    admission = make_admission(config, model, queue, lambda: (0, 0))
    assert isinstance(queue, CompositeQueue)
    assert queue.config.tenants["acme"] == TenantPolicy(
        name="acme", weight=3.0, max_running=8, requests_per_s=20.0, tokens_per_s=5000.0
    )
    assert queue.config.default_tenant.requests_per_s == 2.0
    assert queue.config.prefill_seconds(1000) == pytest.approx(1.0)
    assert tier_policies(config)["interactive"] == TierPolicy(name="interactive", ttft=1.0, tpot=0.1, weight=4.0)
    assert admission._limits["standard"] == TierLimits(max_queued_tokens=200_000, max_delay=10.0)
    burst = [admission.quotas.reserve(str(i), "somebody", 1, 0.0) for i in range(21)]
    assert burst == [0.0] * 20 + [0.5]


def test_a_share_reaches_rates_queues_and_seats():
    """Half of the partitions: half of the rate, of the queue and of the seats."""
    config = WorkerConfig(
        model="tiny",
        tiers={"standard": Tier("standard", default_priority=4, priority_cap=6, max_queued_tokens=100)},
        tenants={"t": Tenant(requests_per_s=1.0, max_running=4)},
        quota_burst_seconds=4.0,
    )
    queue = make_queue(config, StepModel())
    admission = make_admission(config, StepModel(), queue, lambda: (0, 0))
    admission.share(0.5, 0.0)
    assert [admission.quotas.reserve(str(i), "t", 1, 0.0) for i in range(3)] == [0.0, 0.0, 2.0]
    admission.decide(make_request("a", prompt=30), 0.0)
    assert isinstance(admission.decide(make_request("b", prompt=30), 0.0), Refuse)
    for i in range(4):
        queue.push(Sequence(i, make_request(f"r{i}", tenant="t"), 0), 0.0)
    seated = 0
    while (seq := queue.head(0.0)) is not None:
        queue.remove(seq)
        queue.on_admitted(seq, 3, 0.0)
        seated += 1
    assert seated == 2
