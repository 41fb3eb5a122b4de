"""Debian's Prometheus beside two workers under a minute's load: every panel has data, every token is counted once."""

import asyncio
import contextlib
import itertools
import json
import math
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.beside import free_port
from schemas.errors import RequestError
from service.client import Client
from service.errors import ServiceError
from tests import others
from tests.deploy.stack import ROOT
from tests.deploy.test_dashboards import RULES, dashboard_expressions, filled_in
from tests.e2e.test_telemetry import port_of, usage_records, wait_for
from tests.e2e.workers import Producer, WorkerProcess, producing

LOAD_S = 60
LANES = "prom."
# What the load below must make happen: panels that are about it show more than zero. (Nothing of ours dies here, so
# restarts, replaced consumers, failed steps and what a commit waits for may be.)
HAPPENED = {
    "engine: Preemptions",
    "engine: Swapped",
    "engine: Tokens lost and computed again",
    "engine: Predicted and actual cost of coming back",
    "kafka: Attempts",
    "kafka: Dead letters",
    "queue: Ended",
    "queue: Refused",
    "slo: Goodput: tokens of requests that met all",
    "tenants: Cost of the last hour",
    "tenants: Had to wait for their quota",
}
SETTINGS = """
quota_burst_seconds = 20.0
[tiers.interactive]
name = "interactive"
default_priority = 7
priority_cap = 9
ttft_ms = 2000.0
tpot_ms = 250.0

[tiers.standard]
name = "standard"
default_priority = 4
priority_cap = 6
ttft_ms = 10000.0
max_queued_tokens = 300

[tiers.batch]
name = "batch"
default_priority = 1
priority_cap = 3

[tenants.slow]
tokens_per_s = 10.0
"""


class Prometheus:
    """The program, with our configuration but for where the workers are."""

    def __init__(self, folder: Path, targets: list[str]) -> None:
        self._folder = folder
        self.port = free_port()
        config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
        (job,) = config["scrape_configs"]
        del job["dns_sd_configs"]
        job["static_configs"] = [{"targets": targets}]
        self.scrape_s = int(config["global"]["scrape_interval"].removesuffix("s"))
        folder.mkdir()
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        shutil.copy(RULES, folder)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        words = ["prometheus", f"--config.file={self._folder}/prometheus.yml", "--enable-feature=exemplar-storage"]
        words += [f"--storage.tsdb.path={self._folder}/data", f"--web.listen-address=127.0.0.1:{self.port}"]
        with (self._folder / "log").open("wb") as log:
            process = subprocess.Popen(words, stdout=log, stderr=log)
        try:
            await wait_for(self._all_up)
            yield
        finally:
            others.end(process)

    async def _all_up(self) -> bool:
        with contextlib.suppress(OSError):
            return len(await self.query("up == 1")) == 2
        return False

    async def ask(self, path: str, **parameters: str) -> Any:
        def fetch() -> Any:
            address = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
            with urllib.request.urlopen(address, timeout=30) as response:
                return json.load(response)["data"]

        return await asyncio.to_thread(fetch)

    async def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """(labels, value) of each series now."""
        found = await self.ask("query", query=expression)
        return [(each["metric"], float(each["value"][1])) for each in found["result"]]

    async def counted(self, expression: str, *labels: str) -> dict[tuple[str, ...], float]:
        """By those labels; what is zero is left out."""
        return {tuple(each[label] for label in labels): value for each, value in await self.query(expression) if value}


async def load(client: Client, producer: Producer) -> None:
    """A minute of requests of every kind: long ones that are displaced, urgent ones, a throttled tenant's, bursts
    beyond a lane's bound, and requests that are wrong, too late, given up or unanswerable."""
    end = asyncio.get_running_loop().time() + LOAD_S
    prompts = itertools.count()

    async def again(pause: float, **request: Any) -> None:
        while asyncio.get_running_loop().time() < end:
            with contextlib.suppress(ServiceError, RequestError):  # refusals are wanted here
                await client.complete(prompt=f"A common beginning, then {next(prompts)}", **request)
            await asyncio.sleep(pause)

    async def giving_up() -> None:
        while asyncio.get_running_loop().time() < end:
            async with client.stream(prompt="x", tier="batch", max_tokens=1000, ignore_eos=True) as stream:
                await anext(stream)
            await asyncio.sleep(3)

    async def burying() -> None:
        while asyncio.get_running_loop().time() < end:
            await producer._producer.send_and_wait(f"{LANES}batch", b"\xc1", headers=[("reply_to", b"__no")])
            await asyncio.sleep(5)

    long: dict[str, Any] = {"tier": "batch", "max_tokens": 300, "ignore_eos": True, "tenant": "acme"}
    kinds: list[Coroutine[Any, Any, None]] = [giving_up(), burying()]
    kinds += [again(0.1, **long) for _ in range(8)]
    kinds += [again(0.7, tier="interactive", max_tokens=20, tenant="globex") for _ in range(3)]
    kinds += [again(0.2, tier="batch", max_tokens=30, tenant="slow") for _ in range(3)]
    kinds += [again(5, tier="standard", max_tokens=20, n=2, stop=["a"], stream=False) for _ in range(20)]  # a burst
    kinds += [again(2, tier="standard", model="nobody"), again(2, tier="batch", max_tokens=300, deadline=0.05)]
    await asyncio.gather(*kinds)


@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_every_panel_has_data_and_every_token_is_counted(
    kafka: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Two workers are scraped for a minute of load. Each panel's query gives numbers, what happened is more than zero,
    no rule fails, exemplars lead to traces, and tokens and requests, summed over the workers, are those of `usage`."""
    if shutil.which("prometheus") is None:
        pytest.skip("no Prometheus: install Debian's package prometheus")
    monkeypatch.setenv(
        "OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}"
    )  # only traced ones have exemplars
    settings = tmp_path / "worker.toml"
    settings.write_text(SETTINGS)
    arguments = ("--config", str(settings), "--lane-prefix", LANES, "--metrics-port", "0", "--max-num-seqs", "4")
    arguments += ("--session-timeout-ms", "45000")  # a busy machine is to be no dead worker
    async with producing(kafka.bootstrap, LANES, partitions=4) as producer:
        workers = [
            WorkerProcess(kafka.bootstrap, tmp_path / f"{mode}.log", *arguments, "--preemption", mode)
            for mode in ("swap", "recompute")
        ]
        try:
            await asyncio.gather(*(asyncio.to_thread(worker.start) for worker in workers))
            prometheus = Prometheus(tmp_path / "prometheus", [f"127.0.0.1:{port_of(worker)}" for worker in workers])
            async with prometheus.running():
                async with Client(kafka.bootstrap, lane_prefix=LANES) as client:
                    await load(client, producer)
                await wait_for(lambda: idle(prometheus))
                await check_panels(prometheus)
                await asyncio.sleep(2 * prometheus.scrape_s)
                await check_counters(prometheus, await usage_records(kafka.bootstrap))
                await check_rules_and_exemplars(prometheus)
            for worker in workers:
                assert await asyncio.to_thread(worker.stop) == 0
        finally:
            for worker in workers:
                worker.end()


async def idle(prometheus: Prometheus) -> bool:
    """Nothing is in service on either worker, nor in Kafka."""
    return not await prometheus.query("sum(llm_requests_in_service) + sum(llm_lane_lag) > 0")


async def check_panels(prometheus: Prometheus) -> None:
    answers = {}
    for where, expression in dashboard_expressions():
        values = [value for _, value in await prometheus.query(filled_in(expression, "5m"))]
        answers[where, expression] = [value for value in values if math.isfinite(value)]
    assert [query for query, values in answers.items() if not values] == []
    assert {where for where, _ in answers} > HAPPENED
    assert {where for (where, _), values in answers.items() if max(values) <= 0} & HAPPENED == set()


async def check_counters(prometheus: Prometheus, records: list[dict[str, Any]]) -> None:
    records = [record for record in records if record["input"][0].startswith(LANES)]
    by_tier: Counter[tuple[str, ...]] = Counter()
    by_tenant: Counter[tuple[str, ...]] = Counter()
    for record in records:
        for kind, field in (("input", "prompt_tokens"), ("output", "completion_tokens"), ("cached", "cached_tokens")):
            by_tier[record["lane"], kind] += record[field]
            by_tenant[record["tenant"], kind] += record[field]
    assert len({tuple(record["input"][:3]) for record in records}) == len(records) > 100
    assert set(by_tenant) >= {(tenant, "output") for tenant in ("acme", "globex", "slow")}
    assert await prometheus.counted("sum by (tier, type) (llm_tokens_total)", "tier", "type") == +by_tier
    counted = await prometheus.counted("sum by (tenant, type) (llm_tenant_tokens_total)", "tenant", "type")
    assert counted == +by_tenant
    requests = await prometheus.counted("sum by (tenant) (llm_tenant_requests_total)", "tenant")
    assert requests == Counter((record["tenant"],) for record in records)
    assert len(await prometheus.query("sum by (instance) (llm_tokens_total) > 0")) == 2  # both had a part
    modes = await prometheus.counted("sum by (mode) (llm_preemptions_total)", "mode")
    assert set(modes) == {("swap",), ("recompute",)}


async def check_rules_and_exemplars(prometheus: Prometheus) -> None:
    groups = (await prometheus.ask("rules"))["groups"]
    assert {rule["health"] for group in groups for rule in group["rules"]} == {"ok"}
    (letters,) = [r for group in groups for r in group["rules"] if r["name"] == "CarouselDeadLetters"]
    assert letters["state"] == "firing"
    for name in ("time_to_first_token", "time_per_output_token"):
        query, window = f"gen_ai_server_{name}_seconds_bucket", {"start": "0", "end": "9999999999"}
        series = await prometheus.ask("query_exemplars", query=query, **window)
        traces = {exemplar["labels"]["trace_id"] for each in series for exemplar in each["exemplars"]}
        assert len(traces) > 5
        assert all(len(trace) == 32 for trace in traces)
