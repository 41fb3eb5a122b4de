"""What a measurement was taken on."""

import os
import platform
import subprocess
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


class OtherLoad:
    """How many cores programs other than this one and its children use, from construction on (Linux)."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._used = _cpu_seconds_of_others()

    def cores(self) -> float:
        """The mean so far. Children that have not been waited for count as others; 0 where it cannot be told."""
        return max(0.0, _cpu_seconds_of_others() - self._used) / (time.monotonic() - self._since)


def _cpu_seconds_of_others() -> float:
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq, *_ = map(int, stat.read_text().split("\n", 1)[0].split()[1:])
    everybody = (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
    return everybody - sum(os.times()[:4])


def machine_facts(num_threads: int) -> dict[str, Any]:
    """For the JSON file: machine, versions and commit."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "threads": num_threads,
        "commit": _git("rev-parse", "--short=12", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain")),
    }


def _cpu() -> str:
    """The model name, and on x86 the family and model numbers, which virtual machines do not hide."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor() or platform.machine()
    pairs = (line.split(":", 1) for line in cpuinfo.read_text().split("\n\n")[0].splitlines() if ":" in line)
    facts = {key.strip(): value.strip() for key, value in pairs}
    name = facts.get("model name", platform.machine())
    return f"{name}, family {facts['cpu family']} model {facts['model']}" if "cpu family" in facts else name


def _git(*arguments: str) -> str | None:
    try:
        output = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return output.strip()
