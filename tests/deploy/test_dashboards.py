"""Dashboards and alert rules: written by their script, valid for Prometheus, and about metrics that exist."""

import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from tests.deploy.stack import ROOT

DASHBOARDS = ROOT / "deploy/grafana/dashboards"
RULES = ROOT / "deploy/prometheus/alerts.yml"
SERIES = ROOT / "tests/deploy/alerts.test.yml"
METRIC = re.compile(r"\b(?:llm|gen_ai|messaging|process)_[a-z0-9_]+\b")
OF_PROMETHEUS = {"instance", "job", "le"}  # labels that are not ours
VARIABLES = {"$price_input": "1", "$price_output": "1", "$tier": ".*", "$worker": ".*", "$tenant": ".*"}


def documented() -> dict[str, set[str]]:
    """Metric -> its labels, from the tables of docs/metrics.md."""
    found: dict[str, set[str]] = {}
    before: set[str] = set()
    for line in (ROOT / "docs/metrics.md").read_text().splitlines():
        row = re.match(r"\| `(\w+)` \| (\w+) \|[^|]+\|([^|]*)\|", line)
        if row is not None:
            name, kind, labels = row.groups()
            before = before if "as above" in labels else set(re.findall(r"`(\w+)`", labels))
            found[name] = before
            if kind == "histogram":
                found |= {f"{name}_{suffix}": before for suffix in ("bucket", "count", "sum")}
    return found


def dashboard_expressions() -> Iterator[tuple[str, str]]:
    """(where, expression) of every query of every panel."""
    for file in sorted(DASHBOARDS.glob("*.json")):
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel["targets"]:
                yield f"{file.stem}: {panel['title']}", target["expr"]


def filled_in(expression: str, window: str) -> str:
    """A panel's query as Grafana would send it, with everything chosen; `window` is the rate's."""
    for variable, value in (VARIABLES | {"$__rate_interval": window}).items():
        expression = expression.replace(variable, value)
    return expression


def rule_expressions() -> Iterator[tuple[str, str]]:
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


def all_labels(expression: str) -> Iterator[tuple[str, str]]:
    """(metric, label) of every selector, and of every `by` for the metrics in what it groups."""
    for metric, selector in re.findall(r"\b((?:llm|gen_ai|messaging|process)_[a-z0-9_]+)\{([^}]*)\}", expression):
        yield from ((metric, label) for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
    for labels, rest in re.findall(r"\bby \(([^)]*)\) (\(.*?\)(?= /| -| >| <|$|\)))", expression):
        for metric in METRIC.findall(rest.split(" / ")[0]):
            if not metric.startswith("messaging_destination"):
                yield from ((metric, label.strip()) for label in labels.split(","))


def promtool(*words: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("promtool") is None:
        pytest.skip("no promtool: install Debian's package prometheus")
    return subprocess.run(["promtool", *words], capture_output=True, text=True, check=False, timeout=60)


def script() -> ModuleType:
    path = ROOT / "deploy/grafana/make_dashboards.py"
    spec = importlib.util.spec_from_file_location("make_dashboards", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_files_are_what_the_script_writes():
    """`make dashboards` changes nothing."""
    made = script()
    assert {file.stem for file in DASHBOARDS.glob("*.json")} == set(made.DASHBOARDS)
    assert set(made.DASHBOARDS) == {"slo", "queue", "engine", "kafka", "tenants"}
    for name in made.DASHBOARDS:
        assert (DASHBOARDS / f"{name}.json").read_text() == made.rendered(name), f"make dashboards: {name}"


@pytest.mark.parametrize(("where", "expression"), [*dashboard_expressions(), *rule_expressions()])
def test_every_metric_exists(where: str, expression: str):
    """What a panel or a rule asks for is in docs/metrics.md, which a running worker is compared with."""
    known = documented()
    metrics = [name for name in METRIC.findall(expression) if name not in set().union(*known.values())]
    assert metrics or expression.startswith("absent(up"), where
    for metric in metrics:
        assert metric in known, f"{where}: {metric}"
    for metric, label in all_labels(expression):
        assert label in known[metric] | OF_PROMETHEUS, f"{where}: {metric} has no label {label}"


def test_the_list_of_metrics_is_read():
    """The checks above can fail: the list has what it should have, by name and label."""
    known = documented()
    assert len(known) > 60
    assert known["llm_preemptions_total"] == {"tier", "cause", "mode"}
    assert "gen_ai_server_time_per_output_token_seconds_bucket" in known
    assert "tier" in known["gen_ai_server_time_per_output_token_seconds"]
    assert ("llm_steps_total", "tier") in set(all_labels('sum by (tier) (rate(llm_steps_total{instance="x"}[5m]))'))


def test_variables_and_legends_exist():
    """A label in a legend is one that its query keeps; a variable in a query is one that the dashboard has."""
    for file in DASHBOARDS.glob("*.json"):
        board = json.loads(file.read_text())
        names = {variable["name"] for variable in board["templating"]["list"]}
        used = set()
        for panel in board["panels"]:
            for target in panel["targets"]:
                used |= set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"}
                kept = set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", target["expr"]))))
                wanted = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
                assert wanted <= (kept or {"instance"}), f"{file.stem}: {panel['title']}"
        assert used <= names
        assert names - used <= {"model", "tier"}  # the model chooses among the workers
        assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_promtool_accepts_the_rules_and_the_configuration():
    """Debian's promtool finds nothing wrong."""
    for kind, path in (("rules", RULES), ("config", ROOT / "deploy/prometheus/prometheus.yml")):
        answer = promtool("check", kind, str(path))
        assert answer.returncode == 0, answer.stderr


def test_promtool_accepts_every_query(tmp_path: Path):
    """The panels' expressions are PromQL: as recording rules they pass."""
    rules = []
    for i, (_, expression) in enumerate(dashboard_expressions()):
        rules.append({"record": f"checked:query{i}", "expr": filled_in(expression, "5m")})
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    answer = promtool("check", "rules", str(file))
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_the_alerts_fire_when_they_should():
    """promtool plays series through the rules: each alert fires where it must and stays silent where it must not."""
    answer = promtool("test", "rules", str(SERIES))
    assert answer.returncode == 0, answer.stdout + answer.stderr
    tests = [each for test in yaml.safe_load(SERIES.read_text())["tests"] for each in test["alert_rule_test"]]
    assert {each["alertname"] for each in tests if each["exp_alerts"]} == {name for name, _ in rule_expressions()}


def test_every_alert_says_what_to_do():
    """Summary, action and severity; the action names a command or a place that exists."""
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            assert rule["annotations"].keys() == {"summary", "action"}
            assert rule["labels"]["severity"] in ("page", "ticket")
