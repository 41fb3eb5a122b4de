"""The files of a simulation: TOML tables that pydantic checks, and what is wrong with them in one line."""

import tomllib
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1)]

_WORDS = {
    "missing": "is required",
    "missing_keyword_only_argument": "is required",
    "extra_forbidden": "is not known here",
    "unexpected_keyword_argument": "is not known here",
}
_MAX_SHOWN = 60  # characters of a wrong value


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a file. Raises OSError, or ValueError with what is no TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except RecursionError:
        raise ValueError("its arrays or tables are nested too deeply") from None


def explain(error: ValidationError) -> str:
    """Which table and key are wrong, what they must be and what they are, in one line."""
    return "; ".join(_sentence(fault["loc"], fault["type"], fault["msg"], fault["input"]) for fault in error.errors())


def _sentence(location: tuple[int | str, ...], kind: str, message: str, given: object) -> str:
    *tables, key = (str(part) for part in location or ("",))
    where = f"[{'.'.join(tables)}] {key}: " if tables else f"{key}: " if key else ""
    if kind in _WORDS:
        return where + _WORDS[kind]
    if kind in ("dict_type", "model_type"):
        message = "must be a table"
    elif kind == "value_error":
        return where + message.removeprefix("Value error, ")
    shown = repr(given)
    shown = shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}..."
    return f"{where}{message.replace('Input should', 'must')}, got {shown}"
