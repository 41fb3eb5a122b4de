"""Writes docs/configuration.md from the declarations of the settings: `python -m worker.configuration`."""

import inspect
import re
from typing import Any

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from schemas.connection import ENV_PREFIX, KafkaConnection
from schemas.topics import MAX_WEIGHT, MIN_WEIGHT, Tier
from worker.cli import PANELS, flag_type
from worker.config import Tenant, WorkerConfig

_KINDS = {
    "str": "text",
    "int": "integer",
    "float": "number",
    "bool": "yes or no",
    "Path": "path",
    "AboveZero": "number above 0",
    "Positive": "integer, at least 1",
    "Weight": f"number from {MIN_WEIGHT} to {MAX_WEIGHT}",
    "tuple[str, ...]": "list of text",
}
_HEAD = f"""# Configuration of a worker

Written by `make configuration` from the declarations in `worker/config.py`, `schemas/connection.py` and
`schemas/topics.py`.

Each setting is a flag of `carousel worker`, a variable ({ENV_PREFIX} and its name in capitals) and a key of the TOML
file that `--config` names. Flags win over the environment, which wins over the file. `deploy/worker.example.toml` shows
a file. Unknown keys are errors. The other commands take the settings of *Kafka*, in the same ways but for the file.
"""
_TABLES = """
## Tables of the file

Only in the file: `[tiers.NAME]`, `[tenants.NAME]`, and `[default_tenant]` for tenants without a table. Without
`[tiers]` there are three: interactive, standard and batch. [scheduling.md](scheduling.md) says what they mean.
"""
_OTHERS = f"""
## Other variables

| variable | default | meaning |
|---|---|---|
| `{ENV_PREFIX}CACHE` | `~/.cache/carousel` | where prepared models are kept |
| `{ENV_PREFIX}WORKER_URL` | `http://127.0.0.1:9100` | workers of `carousel top` and `console`, with spaces between |
| `HF_HUB_OFFLINE`, `HF_HOME` | | of the Hugging Face hub |
| `OTEL_*` | | where spans go: [metrics.md](metrics.md) |
"""


def page() -> str:
    """The whole document."""
    panels: dict[str, list[str]] = {panel: [] for panel in (*PANELS, "Lanes and service")}
    of_setting = {name: panel for panel, names in PANELS.items() for name in names}
    for name, field in WorkerConfig.model_fields.items():
        if flag_type(field.annotation) is not None:
            panels[of_setting.get(name, "Lanes and service")].append(_setting(name, field))
    parts = [_HEAD]
    for panel, rows in panels.items():
        parts.append(
            f"\n## {panel}\n\n| flag and key | type | default | meaning |\n|---|---|---|---|\n" + "".join(rows)
        )
    parts.append(_TABLES)
    for title, declared in (("`[tiers.NAME]`", Tier), ("`[tenants.NAME]`, `[default_tenant]`", Tenant)):
        parts.append(f"\n### {title}\n\n{_doc(declared)}\n\n| key | type | default | meaning |\n|---|---|---|---|\n")
        parts += _fields(declared)
    return "".join([*parts, _OTHERS])


def _setting(name: str, field: FieldInfo) -> str:
    kind = flag_type(field.annotation)
    default = "**required**" if field.is_required() else "" if field.default is None else _value(field.default)
    if field.default_factory is not None:
        default = ""
    text = (field.description or "").replace("|", "\\|")
    return f"| `--{name.replace('_', '-')}`<br>`{name}` | {_kind(kind, field)} | {default} | {text} |\n"


def _kind(kind: Any, field: FieldInfo) -> str:
    if kind is str and "SecretStr" in str(field.annotation):
        return "text, secret"
    choices = getattr(kind, "__args__", None)
    if choices:
        return ", ".join(f"`{choice}`" for choice in choices)
    return _KINDS[kind.__name__]


def _value(value: Any) -> str:
    assert not isinstance(value, SecretStr), "a secret has no default"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _fields(declared: type) -> list[str]:
    """A row for each field of a dataclass, with the remark behind its declaration."""
    rows = []
    for line in inspect.getsource(declared).splitlines():
        row = re.fullmatch(r"    (\w+): ([^=#]+?)(?: = ([^#]+?))?(?:\s+# (.*))?", line)
        if row is not None:
            name, kind, default, remark = row.groups()
            kind = kind.removesuffix(" | None")
            kind = _KINDS.get(kind, kind)
            shown = "**required**" if default is None else "" if default == "None" else f"`{default.lower()}`"
            rows.append(f"| `{name}` | {kind} | {shown} | {remark or ''} |\n")
    return rows


def _doc(declared: type) -> str:
    return " ".join((inspect.getdoc(declared) or "").split())


if __name__ == "__main__":
    assert set(KafkaConnection.model_fields) <= set(WorkerConfig.model_fields)
    print(page(), end="")
