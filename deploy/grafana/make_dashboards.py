"""Writes the dashboards: `make dashboards`. The names are those of docs/metrics.md; a test compares both."""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "dashboards"
PROMETHEUS = {"type": "prometheus", "uid": "prometheus"}
WIDTH, HEIGHT = 8, 8  # a panel, of 24 columns
T, W = 'tier=~"$tier"', 'instance=~"$worker"'

Query = tuple[str, str]  # expression, legend
VARIABLES = {
    "tier": "label_values(llm_sequences_running, tier)",
    "model": "label_values(llm_worker_info, model)",
    "worker": 'label_values(llm_worker_info{model=~"$model"}, instance)',
    "tenant": "label_values(llm_tenant_tokens_total, tenant)",
}


def panel(title: str, unit: str, *queries: Query, kind: str = "timeseries", exemplar: bool = False, **more: Any) -> Any:
    """unit: Grafana's id. more: `max`, `description`."""
    defaults = {"unit": unit, "min": 0} | {name: value for name, value in more.items() if name == "max"}
    return {
        "type": kind,
        "title": title,
        "description": more.get("description", ""),
        "datasource": PROMETHEUS,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {"refId": chr(65 + i), "datasource": PROMETHEUS, "expr": expr, "legendFormat": legend, "exemplar": exemplar}
            for i, (expr, legend) in enumerate(queries)
        ],
    }


def quantiles(metric: str, labels: str, by: str) -> list[Query]:
    """p50, p95 and p99 of a histogram by one label."""
    return [
        (
            f"histogram_quantile({q}, sum by (le, {by}) (rate({metric}_bucket{{{labels}}}[$__rate_interval])))",
            f"{{{{{by}}}}} p{q * 100:.0f}",
        )
        for q in (0.5, 0.95, 0.99)
    ]


def rate(metric: str, by: str, labels: str = W) -> str:
    return f"sum by ({by}) (rate({metric}{{{labels}}}[$__rate_interval]))"


def attained(slo: str, window: str) -> str:
    met = f'sum by (tier) (increase(llm_slo_requests_total{{slo="{slo}",met="true",{T},{W}}}[{window}]))'
    return f'{met} / sum by (tier) (increase(llm_slo_requests_total{{slo="{slo}",{T},{W}}}[{window}]))'


def tenant_tokens(function: str, kind: str, window: str) -> str:
    return f'sum by (tenant) ({function}(llm_tenant_tokens_total{{type="{kind}",tenant=~"$tenant",{W}}}[{window}]))'


def cost(kind: str) -> str:
    return f"$price_{kind} / 1e6 * {tenant_tokens('increase', kind, '1h')}"


PREFIX_HITS = rate("llm_prefix_hit_tokens_total", "instance")
ALL_OUTPUT = f'scalar(sum(rate(llm_tenant_tokens_total{{type="output",{W}}}[5m])))'
TTFT = "gen_ai_server_time_to_first_token_seconds"
TPOT = "gen_ai_server_time_per_output_token_seconds"

DASHBOARDS: dict[str, tuple[str, tuple[str, ...], list[Any]]] = {
    "slo": (
        "Promises",
        ("model", "worker", "tier"),
        [
            panel("Requests that met every target", "percentunit", (attained("all", "5m"), "{{tier}}"), max=1),
            panel("First token in time", "percentunit", (attained("ttft", "5m"), "{{tier}}"), max=1),
            panel("Tokens in time", "percentunit", (attained("tpot", "5m"), "{{tier}}"), max=1),
            panel("Time to first token", "s", *quantiles(TTFT, f"{T},{W}", "tier"), exemplar=True),
            panel("Time per output token", "s", *quantiles(TPOT, f"{T},{W}", "tier"), exemplar=True),
            panel(
                "Duration of a request",
                "s",
                *quantiles("gen_ai_server_request_duration_seconds", f"{T},{W}", "tier"),
                exemplar=True,
            ),
            panel(
                "Goodput: tokens of requests that met all",
                "short",
                (rate("llm_goodput_tokens_total", "tier", f"{T},{W}"), "{{tier}}"),
            ),
            panel(
                "Error budget burnt (1: as fast as a target of 95 % allows)",
                "short",
                (f"(1 - ({attained('all', '5m')})) / 0.05", "{{tier}} 5 min"),
                (f"(1 - ({attained('all', '1h')})) / 0.05", "{{tier}} 1 h"),
            ),
            panel(
                "Targets", "s", (f"max by (tier, slo) (llm_slo_target_seconds{{{T}}})", "{{tier}} {{slo}}"), kind="stat"
            ),
        ],
    ),
    "queue": (
        "Queue",
        ("model", "worker", "tier"),
        [
            panel("Depth", "short", (f"sum by (tier) (llm_queue_depth{{{T},{W}}})", "{{tier}}")),
            panel("Oldest age", "s", (f"max by (tier) (llm_queue_oldest_age_seconds{{{T},{W}}})", "{{tier}}")),
            panel("Wait for the first seat", "s", *quantiles("llm_queue_wait_seconds", f"{T},{W}", "tier")),
            panel(
                "Refused", "reqps", (rate("llm_requests_refused_total", "tier, code", f"{T},{W}"), "{{tier}} {{code}}")
            ),
            panel(
                "Prompt tokens that wait", "short", (f"sum by (tier) (llm_queue_prompt_tokens{{{T},{W}}})", "{{tier}}")
            ),
            panel(
                "Sequences without a seat", "short", (f"sum by (tier) (llm_sequences_waiting{{{T},{W}}})", "{{tier}}")
            ),
            panel("In service", "short", (f"sum by (tier) (llm_requests_in_service{{{T},{W}}})", "{{tier}}")),
            panel(
                "Waiting for their quota", "short", (f"sum by (instance) (llm_requests_delayed{{{W}}})", "{{instance}}")
            ),
            panel(
                "Ended",
                "reqps",
                (rate("llm_requests_total", "outcome, finish_reason", f"{T},{W}"), "{{outcome}} {{finish_reason}}"),
            ),
        ],
    ),
    "engine": (
        "Engine",
        ("model", "worker", "tier"),
        [
            panel(
                "Seats",
                "short",
                (f"sum by (tier) (llm_sequences_running{{{T},{W}}})", "{{tier}}"),
                (f"sum(llm_seats{{{W}}})", "there are"),
            ),
            panel("Tokens computed", "short", (rate("llm_batch_tokens_total", "phase"), "{{phase}}")),
            panel("KV blocks", "short", (f"sum by (pool, state) (llm_kv_blocks{{{W}}})", "{{pool}} {{state}}")),
            panel("Step time by part", "s", *quantiles("llm_step_duration_seconds", W, "part")),
            panel(
                "Steps, and tries that failed",
                "ops",
                (rate("llm_steps_total", "instance"), "{{instance}}"),
                (rate("llm_step_failures_total", "instance"), "{{instance}} failed"),
            ),
            panel("Sequences in a step", "short", *quantiles("llm_batch_sequences", W, "instance")),
            panel(
                "Preemptions",
                "ops",
                (rate("llm_preemptions_total", "tier, cause, mode", f"{T},{W}"), "{{tier}} {{cause}} {{mode}}"),
            ),
            panel(
                "Tokens lost and computed again",
                "short",
                (rate("llm_preempted_tokens_total", "mode"), "lost, {{mode}}"),
                (rate("llm_recomputed_tokens_total", "instance"), "again, {{instance}}"),
            ),
            panel("Swapped", "Bps", (rate("llm_swap_bytes_total", "direction"), "{{direction}}")),
            panel(
                "Predicted and actual cost of coming back",
                "s",
                (rate("llm_swap_seconds_total", "direction, kind"), "swap {{direction}} {{kind}}"),
                (rate("llm_recompute_seconds_total", "kind"), "recompute {{kind}}"),
            ),
            panel(
                "Prefix cache",
                "percentunit",
                (f"{PREFIX_HITS} / {rate('llm_prefix_lookup_tokens_total', 'instance')}", "{{instance}}"),
                max=1,
            ),
            panel("Paused sequences", "ops", (rate("llm_paused_sequences_total", "instance"), "{{instance}}")),
        ],
    ),
    "kafka": (
        "Kafka",
        ("model", "worker", "tier"),
        [
            panel("Not taken in", "short", (f"sum by (tier) (llm_lane_lag{{{T},{W}}})", "{{tier}}")),
            panel(
                "Done, and not committed yet",
                "short",
                (f"max by (tier, partition) (llm_offsets_gap{{{T},{W}}})", "{{tier}}/{{partition}}"),
            ),
            panel(
                "Age of what holds the commit up",
                "s",
                (f"max by (tier, partition) (llm_offsets_head_age_seconds{{{T},{W}}})", "{{tier}}/{{partition}}"),
            ),
            panel(
                "Taken in",
                "ops",
                (
                    rate("messaging_client_consumed_messages_total", "messaging_destination_name"),
                    "{{messaging_destination_name}}",
                ),
            ),
            panel(
                "Acknowledged",
                "ops",
                (
                    rate("messaging_client_sent_messages_total", "messaging_destination_name"),
                    "{{messaging_destination_name}}",
                ),
            ),
            panel(
                "A send until its acknowledgement",
                "s",
                *quantiles("messaging_client_operation_duration_seconds", W, "messaging_destination_name"),
            ),
            panel(
                "Re-balances, consumers replaced",
                "ops",
                (rate("llm_kafka_rebalances_total", "tier"), "{{tier}}"),
                (rate("llm_lanes_replaced_total", "tier"), "{{tier}} replaced"),
            ),
            panel(
                "Partitions",
                "short",
                (f"sum by (tier, instance) (llm_lane_partitions{{{T},{W}}})", "{{tier}} {{instance}}"),
            ),
            panel("Dead letters", "ops", (rate("llm_dlq_records_total", "reason"), "{{reason}}")),
            panel("Attempts", "ops", (rate("llm_attempts_total", "tier, kind", f"{T},{W}"), "{{tier}} {{kind}}")),
            panel(
                "Event loop: worst lag of a minute",
                "s",
                (f"max by (instance) (llm_loop_lag_worst_seconds{{{W}}})", "{{instance}}"),
            ),
            panel(
                "Workers",
                "short",
                (f"sum(llm_worker_ready{{{W}}})", "ready"),
                (f"sum(llm_worker_draining{{{W}}})", "draining"),
                (f"sum(llm_worker_restarts_total{{{W}}})", "restarts"),
            ),
        ],
    ),
    "tenants": (
        "Tenants",
        ("model", "worker", "tenant"),
        [
            panel(
                "Output tokens",
                "short",
                (rate("llm_tenant_tokens_total", "tenant", f'type="output",tenant=~"$tenant",{W}'), "{{tenant}}"),
            ),
            panel(
                "Input tokens",
                "short",
                (rate("llm_tenant_tokens_total", "tenant", f'type="input",tenant=~"$tenant",{W}'), "{{tenant}}"),
            ),
            panel(
                "Requests",
                "reqps",
                (rate("llm_tenant_requests_total", "tenant", f'tenant=~"$tenant",{W}'), "{{tenant}}"),
            ),
            panel(
                "Had to wait for their quota",
                "reqps",
                (rate("llm_tenant_throttled_total", "tenant", f'tenant=~"$tenant",{W}'), "{{tenant}}"),
            ),
            panel(
                "Share of all output tokens",
                "percentunit",
                (f"{tenant_tokens('rate', 'output', '5m')} / {ALL_OUTPUT}", "{{tenant}}"),
                max=1,
            ),
            panel(
                "Cost of the last hour",
                "currencyUSD",
                (f"{cost('input')} + {cost('output')}", "{{tenant}}"),
                description="Prices of a million tokens are the variables above",
            ),
            panel(
                "Part of every limit that a worker enforces",
                "percentunit",
                (f"llm_worker_share{{{W}}}", "{{instance}}"),
                max=1,
            ),
        ],
    ),
}
PRICES = {"price_input": "0.10", "price_output": "0.40"}


def dashboard(uid: str) -> dict[str, Any]:
    title, variables, panels = DASHBOARDS[uid]
    for i, made in enumerate(panels):
        made |= {"id": i + 1, "gridPos": {"x": i % 3 * WIDTH, "y": i // 3 * HEIGHT, "w": WIDTH, "h": HEIGHT}}
    listed = [
        {
            "name": name,
            "type": "query",
            "datasource": PROMETHEUS,
            "query": {"query": VARIABLES[name], "refId": name},
            "definition": VARIABLES[name],
            "includeAll": True,
            "multi": True,
            "current": {"text": "All", "value": "$__all"},
            "refresh": 2,
        }
        for name in variables
    ]
    if uid == "tenants":
        listed += [
            {"name": name, "type": "textbox", "query": price, "current": {"text": price, "value": price}}
            for name, price in PRICES.items()
        ]
    return {
        "uid": f"carousel-{uid}",
        "title": f"Carousel: {title}",
        "tags": ["carousel"],
        "schemaVersion": 41,
        "editable": False,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "links": [{"type": "dashboards", "tags": ["carousel"], "title": "", "asDropdown": False, "keepTime": True}],
        "templating": {"list": listed},
        "panels": panels,
    }


def rendered(uid: str) -> str:
    return json.dumps(dashboard(uid), indent=1) + "\n"


if __name__ == "__main__":
    for name in DASHBOARDS:
        (FOLDER / f"{name}.json").write_text(rendered(name))
