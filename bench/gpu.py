"""The Triton kernels and the worker's runner on a GPU: are they right, how fast? `python -m bench.gpu --help`.

One prepared run of a few minutes: every kernel against its specification first, and the runner's tokens against the
CPU's; then paged decodes against the memory's bandwidth, prefill beside torch's attention, swaps over the bus, the
small kernels, steps with and without graphs. Needs torch with CUDA or ROCm, Triton and numpy; for the runner
transformers, too. Exit status: 0 all right, 1 something is wrong, 2 no GPU.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import torch

# The interpreter is dozens to thousands of times slower than a GPU.
_DRY_RUN_SCALE = 16


def facts(device: str) -> dict[str, Any]:
    """What was measured on."""
    known = {"python": sys.version.split()[0], "torch": torch.__version__, "triton": version("triton")}
    if device == "cpu":
        return known | {"gpu": "none: a dry run in Triton's interpreter, whose figures mean nothing"}
    properties = torch.cuda.get_device_properties(0)
    return known | {
        "gpu": properties.name,
        "arch": getattr(properties, "gcnArchName", f"sm_{properties.major}{properties.minor}"),
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "driver_runtime": torch.version.cuda or torch.version.hip,
    }


def measure_line(measure: dict[str, Any], roof: float) -> str:
    """One row of the table; `roof` in bytes per second."""
    line = f"{measure['name']:<62}{measure['seconds'] * 1e6:>11.1f}"
    rate = measure["bytes"] / measure["seconds"]
    line += f"{rate / 1e9:>9.0f}{rate / roof:>7.0%}" if measure["bytes"] else f"{'':>16}"
    line += f"{measure['flops'] / measure['seconds'] / 1e12:>9.1f}" if measure["flops"] else f"{'':>9}"
    host = measure["host_seconds"]
    line += f"{host * 1e6:>9.1f}" if host is not None else f"{'':>9}"
    yardstick = measure["yardstick_seconds"]
    return line + (f"{yardstick * 1e6:>11.1f}" if yardstick is not None else "")


def run(device: str, scale: int) -> dict[str, Any]:
    """Prints the tables as they come; returns what the JSON file holds."""
    from bench import gpu_checks, gpu_measures  # Triton takes its mode when it is imported

    runner: Any = None
    if find_spec("transformers") is None:
        print("the runner is left out: transformers is not installed")
    else:
        from bench import gpu_runner as runner

    report: dict[str, Any] = {"machine": facts(device), "checks": [], "measures": []}
    print(*(f"{key}: {value}" for key, value in report["machine"].items()), sep="\n")
    print(f"\n{'check':<42}{'error':>12}{'tolerance':>12}")
    checks = gpu_checks.all_checks(device, scale)
    for check in checks if runner is None else chain(checks, runner.all_checks(device, scale)):
        report["checks"].append(asdict(check) | {"passed": check.passed})
        print(
            f"{check.name:<42}{check.error:>12.2e}{check.tolerance:>12.2e}{'' if check.passed else '  WRONG'}",
            flush=True,
        )
    print(f"\n{'':<62}{'us':>11}{'GB/s':>9}{'roof':>7}{'TFLOP/s':>9}{'host us':>9}{'torch us':>11}")
    roof = 0.0
    bench = gpu_measures.Bench(device, scale)
    measures = gpu_measures.all_measures(bench)
    for measure in measures if runner is None else chain(measures, runner.all_measures(bench)):
        roof = roof or measure.bytes / measure.seconds  # the first is the memory itself
        report["measures"].append(asdict(measure))
        print(measure_line(report["measures"][-1], roof), flush=True)
    report["roof_bytes_per_second"] = roof
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="where the results go, too")
    parser.add_argument(
        "--dry-run", action="store_true", help="everything once, tiny, in Triton's interpreter: does the script work?"
    )
    options = parser.parse_args(arguments)
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
        report = run("cpu", _DRY_RUN_SCALE)
    elif torch.cuda.is_available():
        report = run("cuda", 1)
    else:
        print("no GPU: torch sees no CUDA or ROCm device here, so there is nothing to measure")
        return 2
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    wrong = [check["name"] for check in report["checks"] if not check["passed"]]
    print(f"\nwritten to {options.json}; " + (f"WRONG: {', '.join(wrong)}" if wrong else "all checks passed"))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
