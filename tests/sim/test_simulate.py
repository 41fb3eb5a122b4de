"""`carousel simulate`: figures that can be checked by hand, the same bytes each time, and mistakes that are told."""

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from typer.testing import CliRunner

from service.cli import app
from worker.engine.tiers import TenantPolicy, TierPolicy
from worker.sim.fleet import Slo
from worker.sim.levels import load_levels
from worker.sim.picture import document
from worker.sim.profile import PROFILES, load_profile
from worker.sim.summary import percentile
from worker.sim.trace import Arrival, read_trace

HEADER = "arrival_s,tenant,input_tokens,output_tokens"
STEADY = """
base_s = 0.01
prefill_s = 0.0
context_s = 0.0
decode_s = 0.0
swap_s = 0.0
num_blocks = 100
max_num_seqs = 2
max_num_batched_tokens = 64
max_model_len = 400
"""
TIERS = """
[tiers.fast]
class = 1
ttft = 0.015
tenants = ["ann"]
[tiers.slow]
tpot = 0.02
max_queued_tokens = 100
deadline = 20
[tenants.ann]
weight = 2.0
"""


def run(folder: Path, rows: list[str], *options: str, header: str = HEADER, status: int = 0) -> str:
    """Runs the command in a folder, on a machine whose every step takes 10 ms; returns what it printed."""
    (folder / "trace.csv").write_text("\n".join([header, *rows, ""]))
    (folder / "steady.toml").write_text(STEADY)
    (folder / "tiers.toml").write_text(TIERS)
    arguments = ["simulate", "--trace", str(folder / "trace.csv"), "--profile", str(folder / "steady.toml"), *options]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == status, result.output
    return result.output


def figures(folder: Path, rows: list[str], *options: str, header: str = HEADER) -> dict:
    return json.loads(run(folder, rows, *options, "--json", header=header))


def test_the_figures_can_be_worked_out(tmp_path: Path):
    """Two seats, three requests at 10 ms a step: the third waits for the first; everything follows."""
    found = figures(tmp_path, ["0,ann,4,10", "0,bob,4,20", "0,bob,4,10"], "--policy", "fcfs")
    assert (found["requests"], found["finished"], found["refused"]) == (3, 3, 0)
    assert found["output_tok_s"] == 200  # 40 tokens in 0.2 s
    assert found["max_wait_s"] == 0.1
    assert found["preemptions"] == {"swap": 0, "recompute": 0}
    assert found["recomputed_tokens"] == 0
    ((name, tier),) = found["tiers"].items()
    assert name == "standard"
    assert tier["finished"] == 3
    assert tier["ttft_ms"] == {"p50": 10, "p99": 110}
    assert tier["tpot_ms"] == {"p50": 10, "p99": 10}
    assert tier["goodput"] == 15
    assert found["tenants"]["ann"] == {"service_tokens": 14, "finished": 1, "ttft_ms": {"p50": 10, "p99": 10}}
    assert found["tenants"]["bob"]["service_tokens"] == 38
    # In step n the first two hold 4 + n tokens each, then the second and the third: all by 1,600 slots.
    filled = 2 * sum(range(4, 14)) + sum(range(14, 24)) + sum(range(4, 14))
    assert found["kv_use_mean"] == pytest.approx(filled / 20 / 1600, abs=1e-6)


def test_the_same_arguments_give_the_same_bytes(tmp_path: Path):
    """JSON, table and picture; another seed spreads requests over two workers in another way."""
    rows = [f"{i / 50},t{i % 3},{5 + i % 40},{1 + i % 30}" for i in range(60)]
    picture = tmp_path / "p.svg"
    srtf = ("--policy", "srtf", "--tiers", str(tmp_path / "late.toml"), "--json")
    (tmp_path / "late.toml").write_text("[tiers.standard]\ndeadline = 0.5\nrefuse_unreachable = true\n")
    for options in (("--json",), ("--workers", "2", "--seed", "1", "--json"), ("--plot", str(picture)), srtf):
        first = run(tmp_path, rows, *options), picture.read_bytes() if picture.exists() else b""
        assert first == (run(tmp_path, rows, *options), picture.read_bytes() if picture.exists() else b"")
    seeds = [figures(tmp_path, rows, "--workers", "2", "--seed", seed)["tiers"] for seed in "12"]
    assert seeds[0] != seeds[1]
    ET.parse(picture)


@pytest.mark.parametrize("policy", ["composite", "fcfs", "priority", "wfq", "srtf", "edf"])
def test_every_policy_serves_everything(tmp_path: Path, policy: str):
    """Whatever the order, in a pool too small for all at once every request has its tokens."""
    rows = [f"{i / 100},t{i % 3},{20 + i % 60},{1 + i % 50}" for i in range(40)]
    found = figures(tmp_path, rows, "--policy", policy)
    assert found["finished"] == found["requests"] == 40
    served = sum(tenant["service_tokens"] for tenant in found["tenants"].values())
    assert served == sum(20 + i % 60 + 1 + i % 50 for i in range(40))


def test_tiers_come_from_the_trace_else_from_the_tenant_else_by_default(tmp_path: Path):
    """A tier column wins, then the tier that names the tenant; the urgent tier is served first."""
    rows = ["0,bob,4,30,", "0,bob,4,30,", "0.001,bob,4,5,", "0.001,ann,4,5,", "0.002,bob,4,5,fast"]
    options = ("--tiers", str(tmp_path / "tiers.toml"))
    found = figures(tmp_path, rows, *options, header=HEADER + ",tier")
    assert {name: tier["requests"] for name, tier in found["tiers"].items()} == {"fast": 2, "slow": 3}
    assert found["tiers"]["fast"]["ttft_ms"]["p99"] < 30, "they displace for a seat"
    assert found["preemptions"]["swap"] + found["preemptions"]["recompute"] > 0
    other = figures(tmp_path, ["0,bob,4,5,gold", "0,bob,4,5,"], header=HEADER + ",tier")
    assert list(other["tiers"]) == ["standard", "gold"]
    assert "has not" in run(tmp_path, ["0,bob,4,5,gold"], *options, header=HEADER + ",tier", status=2)


def test_what_cannot_be_served_is_refused(tmp_path: Path):
    """Beyond the context, beyond the queue's bound: refused; past its deadline: expired; the others are served."""
    rows = ["0,bob,390,20", "0,bob,90,10", "0,bob,90,10", "0,bob,90,10"]
    found = figures(tmp_path, rows, "--tiers", str(tmp_path / "tiers.toml"))
    assert (found["requests"], found["finished"], found["refused"], found["expired"]) == (4, 1, 3, 0)
    long = ["0,bob,4,300", "0,bob,4,300", *(["0,bob,4,300"] * 42)]
    late = figures(tmp_path, long, "--tiers", str(tmp_path / "tiers.toml"))
    assert late["finished"] + late["refused"] + late["expired"] == 44
    assert late["expired"] > 0


def test_a_deadline_that_cannot_be_met_is_refused_at_once(tmp_path: Path):
    """As in the worker: by the length that is predicted for the tenant, and by what the step decodes beside it.

    At 10 ms a step and 128 tokens, what a tenant without a history is taken for, an answer takes 1.28 s.
    """
    path = tmp_path / "late.toml"
    path.write_text("[tiers.standard]\ndeadline = 1.0\nrefuse_unreachable = true\n[tiers.other]\n")

    def ends(*rows: str, profile: str = STEADY) -> tuple[int, int, int]:
        (tmp_path / "machine.toml").write_text(profile)
        options = ("--tiers", str(path), "--profile", str(tmp_path / "machine.toml"))
        found = figures(tmp_path, list(rows), *options, header=HEADER + ",tier")
        return found["finished"], found["refused"], found["expired"]

    assert ends("0,ann,4,200,") == (0, 1, 0)
    assert ends("0,ann,4,50,") == (1, 0, 0)
    # It is known by then that ann's answers are short: what was thought too long is admitted, and is too long.
    history = [f"{i},ann,4,5,other" for i in range(40)]
    assert ends(*history, "50,ann,4,200,") == (40, 0, 1)
    # A step with another decode takes 20 ms instead of 10: then 80 tokens are too many.
    slow = STEADY.replace("base_s = 0.01", "base_s = 0.0").replace("decode_s = 0.0", "decode_s = 0.01")
    assert ends("0,ann,4,80,", profile=slow) == (1, 0, 0)
    assert ends("0,bob,4,380,other", "0.5,ann,4,80,", profile=slow) == (1, 1, 0)


def test_srtf_learns_how_long_the_answers_of_a_tenant_are(tmp_path: Path):
    """One seat: of two that wait the one whose tenant has answered shortly goes first, though it came later."""
    history = [f"{2 * i},short,4,5" for i in range(20)] + [f"{2 * i + 1},long,4,90" for i in range(20)]
    rows = [*history, "100,first,4,100", "100.1,long,4,100", "100.2,short,4,100"]
    one_seat = STEADY.replace("max_num_seqs = 2", "max_num_seqs = 1")
    (tmp_path / "seat.toml").write_text(one_seat)
    waits = {}
    for policy in ("fcfs", "srtf"):
        found = figures(tmp_path, rows, "--policy", policy, "--profile", str(tmp_path / "seat.toml"))
        waits[policy] = [found["tenants"][name]["ttft_ms"]["p99"] for name in ("short", "long")]
    assert waits["fcfs"] == [1810, 910]
    assert waits["srtf"] == [810, 1910]


def test_how_many_workers_a_promise_needs(tmp_path: Path):
    """The smallest number of workers that keeps the SLO: one less does not."""
    rows = [f"{i / 100},t,4,30" for i in range(60)]
    found = figures(tmp_path, rows, "--slo", "standard:ttft=0.055")
    workers = found["workers"]
    assert found["tiers"]["standard"]["ttft_ms"]["p99"] <= 55
    assert workers > 1
    fewer = figures(tmp_path, rows, "--workers", str(workers - 1))
    assert fewer["tiers"]["standard"]["ttft_ms"]["p99"] > 55
    assert "do not meet it" in run(tmp_path, rows, "--slo", "standard:ttft=0.001", status=1)


def test_rate_and_limit(tmp_path: Path):
    """--rate squeezes arrivals in time; --limit takes the first requests in order of arrival."""
    rows = ["4,b,1,1", "0,a,1,1", "2,a,1,1"]
    assert figures(tmp_path, rows)["span_s"] == 4.01
    assert figures(tmp_path, rows, "--rate", "2")["span_s"] == 2.01
    assert list(figures(tmp_path, rows, "--limit", "2")["tenants"]) == ["a"]


def test_the_table_is_for_people(tmp_path: Path):
    """Tier, tenant and totals; no JSON."""
    said = run(tmp_path, ["0,ann,4,10"])
    for words in ("standard", "ann", "1 of 1 finished", "KV use", "longest wait"):
        assert words in said


def test_usage_mistakes(tmp_path: Path):
    """Without a trace, or with a picture that is no SVG, the usage is shown."""
    assert CliRunner().invoke(app, ["simulate"]).exit_code == 2
    assert "SVG" in run(tmp_path, ["0,a,1,1"], "--plot", "p.png", status=2)


def test_a_seed_of_the_fuzzer_replays():
    """`--fuzz` runs one world and says how far it came."""
    result = CliRunner().invoke(app, ["simulate", "--fuzz", "--seed", "1", "--steps", "50"])
    assert result.exit_code == 0
    assert "seed 1:" in result.output


def test_a_count_of_nothing_is_one(tmp_path: Path):
    """Traces have requests without output; the engine serves a token at least."""
    (tmp_path / "t.csv").write_text(HEADER + "\n1.5,a,0,0\n")
    assert read_trace(tmp_path / "t.csv") == [Arrival(1.5, "a", 1, 1)]


def test_tiers_and_tenants_from_a_file(tmp_path: Path):
    """Policies, classes, deadlines and limits."""
    path = tmp_path / "tiers.toml"
    path.write_text(TIERS)
    levels = load_levels(path)
    assert levels.tiers["fast"] == TierPolicy(name="fast", ttft=0.015)
    assert levels.classes == {"fast": 1, "slow": 0}
    assert levels.deadlines == {"slow": 20.0}
    assert levels.limits["slow"].max_queued_tokens == 100
    assert levels.tenants == {"ann": TenantPolicy(name="ann", weight=2.0)}


def test_profiles(tmp_path: Path):
    """A file may begin with a named profile."""
    path = tmp_path / "mine.toml"
    path.write_text('like = "h200"\nnum_blocks = 10\n')
    mine = load_profile(str(path))
    assert (mine.name, mine.num_blocks, mine.base_s) == ("mine", 10, PROFILES["h200"].base_s)
    assert mine.step_s(2, 3, 4, 5) == pytest.approx(
        mine.base_s + 2 * mine.prefill_s + 3 * mine.context_s + 4 * mine.decode_s + 5 * mine.swap_s
    )


def test_percentiles_are_nearest_rank():
    """Of 1 to 100 the 99th is 99; of one value it is that; of none there is none."""
    assert percentile(range(1, 101), 0.99) == 99
    assert percentile([3.0], 0.5) == 3.0
    assert percentile([], 0.5) is None


def test_an_slo_is_read():
    """TIER:ttft=S,tpot=S."""
    assert Slo.parse("a:ttft=1.5,tpot=0.1") == Slo("a", 1.5, 0.1)
    for text in ("a:", ":ttft=1", "a:ttft=x", "a:p99=1", "a:ttft=nan", "a:ttft=-1", "a:ttft=inf"):
        with pytest.raises(ValueError, match="an SLO is"):
            Slo.parse(text)


def test_quotas_are_of_the_deployment(tmp_path: Path):
    """However many workers, together they grant a tenant what one would, but for the burst of a bucket's rounding."""
    tiers = "[tiers.standard]\nmax_delay = 1.0\n[tenants.ann]\nrequests_per_s = 2\n"
    (tmp_path / "quota.toml").write_text(tiers)
    rows = [f"{i / 20},ann,4,2" for i in range(400)]
    finished = [
        figures(tmp_path, rows, "--tiers", str(tmp_path / "quota.toml"), "--workers", str(n))["finished"]
        for n in (1, 4)
    ]
    assert 50 <= finished[0] <= 65
    assert abs(finished[1] - finished[0]) <= 8


def test_a_picture_holds_any_name():
    """What XML cannot hold is shown as such; the rest is escaped."""
    drawn = ET.fromstring(document("a\x01<&\u2028b", [], []))
    assert [each.text for each in drawn.iter("{http://www.w3.org/2000/svg}text")] == ["a\ufffd<&\ufffdb"]
