"""`carousel simulate` told something wrong: one line that names the file, the table or line and the key; status 2."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from service.cli import app

HEADER = "arrival_s,tenant,input_tokens,output_tokens"
PROFILE = """
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


def simulate(folder: Path, files: dict[str, str | bytes], *options: str):
    """Runs the command on the files given and sound others."""
    for name, text in {"trace.csv": f"{HEADER}\n0,ann,4,2\n", "profile.toml": PROFILE, **files}.items():
        (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
    arguments = ["simulate", "--trace", str(folder / "trace.csv"), "--profile", str(folder / "profile.toml")]
    if "tiers.toml" in files:
        arguments += ["--tiers", str(folder / "tiers.toml")]
    return CliRunner().invoke(app, [*arguments, *options])


def trace(*rows: str, header: str = HEADER) -> tuple[str, str]:
    return "trace.csv", "\n".join([header, *rows, ""])


def tier(line: str) -> tuple[str, str]:
    return "tiers.toml", f"[tiers.fast]\n{line}\n"


def tenant(line: str) -> tuple[str, str]:
    return "tiers.toml", f"[tiers.fast]\n[tenants.ann]\n{line}\n"


def profile(key: str, value: str) -> tuple[str, str]:
    lines = [line for line in PROFILE.splitlines() if not line.startswith(f"{key} =")]
    return "profile.toml", "\n".join([*lines, f"{key} = {value}" if value else "", ""])


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (trace("0,,4,2"), "line 2: tenant: "),
        (trace("0,ann,4,2", "x,ann,4,2"), "line 3: arrival_s: must be a valid number"),
        (trace("-1,ann,4,2"), "line 2: arrival_s: must be greater than or equal to 0, got '-1'"),
        (trace("nan,ann,4,2"), "line 2: arrival_s: must be a finite number, got 'nan'"),
        (trace("inf,ann,4,2"), "line 2: arrival_s: must be a finite number, got 'inf'"),
        (trace("0,ann,four,2"), "line 2: input_tokens: must be a valid integer"),
        (trace("0,ann,4.5,2"), "line 2: input_tokens: must be a valid integer"),
        (trace("0,ann,4,-2"), "line 2: output_tokens: must be greater than or equal to 0, got '-2'"),
        (trace("0,ann,4,1000000000000"), "line 2: output_tokens: must be less than or equal to 1000000000"),
        (trace("0,ann,4"), "line 2: output_tokens: "),
        (trace("0,ann,4,2,7"), "line 2: more cells than the header has columns"),
        (trace('0,"ann,4,2'), "line 2: unexpected end of data"),
        (trace("0,ann", header="arrival_s,tenant"), "no column input_tokens, output_tokens"),
        (trace("0,ann,4,2,9", header=f"{HEADER},tenant"), "column tenant is there twice"),
        (trace(), "no requests"),
        (("trace.csv", ""), "no column arrival_s"),
        (("trace.csv", b"\xff\xfe0\x00"), "'utf-8' codec can't decode byte 0xff"),
        (trace("1e300,ann,4,2"), "must be at most 1e+12"),
        (("tiers.toml", "tiers = 3"), "tiers: must be a table, got 3"),
        (("tiers.toml", "[tiers]\nfast = 3"), "[tiers] fast: must be a table, got 3"),
        (("tiers.toml", "[tiers"), "Expected ']' at the end of a table"),
        (("tiers.toml", "[tenants.ann]"), "tiers: is required"),
        (("tiers.toml", "[tiers]"), "there is no [tiers.NAME]"),
        (("tiers.toml", "[tiers.fast]\n[quotas.ann]"), "quotas: is not known here"),
        (
            ("tiers.toml", '[tiers.a]\ntenants = ["x"]\n[tiers.b]\ntenants = ["x"]'),
            "tenant 'x' is in the tiers a and b",
        ),
        (tier('ttft = "1"'), "[tiers.fast] ttft: must be a valid number, got '1'"),
        (tier("ttft = -1"), "[tiers.fast] ttft: must be greater than 0, got -1"),
        (tier("tpot = nan"), "[tiers.fast] tpot: must be a finite number, got nan"),
        (tier('weight = "2"'), "[tiers.fast] weight: must be a valid number, got '2'"),
        (tier("weight = 0"), "[tiers.fast] weight: must be greater than or equal to 0.000001, got 0"),
        (tier("weight = 1e300"), "[tiers.fast] weight: must be less than or equal to 1000000, got 1e+300"),
        (tier("class = inf"), "[tiers.fast] class: must be a valid integer, got inf"),
        (tier("class = -1"), "[tiers.fast] class: must be greater than or equal to 0, got -1"),
        (tier("max_preemptions = -1"), "[tiers.fast] max_preemptions: must be greater than or equal to 0, got -1"),
        (tier("max_queued_tokens = 0"), "[tiers.fast] max_queued_tokens: must be greater than or equal to 1, got 0"),
        (tier("max_delay = -1"), "[tiers.fast] max_delay: must be greater than or equal to 0, got -1"),
        (tier("may_preempt = 1"), "[tiers.fast] may_preempt: must be a valid boolean, got 1"),
        (tier("deadline = 0"), "[tiers.fast] deadline: must be greater than 0, got 0"),
        (tier('tenants = "ann"'), "[tiers.fast] tenants: must be a valid list, got 'ann'"),
        (tier("speed = 1"), "[tiers.fast] speed: is not known here"),
        (tenant("requests_per_s = 0"), "[tenants.ann] requests_per_s: must be greater than 0, got 0"),
        (tenant("requests_per_s = -3"), "[tenants.ann] requests_per_s: must be greater than 0, got -3"),
        (tenant('requests_per_s = "x"'), "[tenants.ann] requests_per_s: must be a valid number, got 'x'"),
        (tenant("weight = 1e-300"), "[tenants.ann] weight: must be greater than or equal to 0.000001, got 1e-300"),
        (tenant("weight = true"), "[tenants.ann] weight: must be a valid number, got True"),
        (tenant("max_running = 0"), "[tenants.ann] max_running: must be greater than or equal to 1, got 0"),
        (profile("max_num_seqs", "2.5"), "max_num_seqs: must be a valid integer, got 2.5"),
        (profile("max_num_seqs", ""), "max_num_seqs: is required"),
        (profile("num_blocks", "100.5"), "num_blocks: must be a valid integer, got 100.5"),
        (profile("num_blocks", "0"), "num_blocks: must be greater than or equal to 1, got 0"),
        (profile("num_blocks", "100000000000"), "num_blocks: must be less than or equal to 10000000"),
        (profile("base_s", "inf"), "base_s: must be less than or equal to 1000000, got inf"),
        (profile("prefill_s", "-1.0"), "prefill_s: must be greater than or equal to 0, got -1.0"),
        (profile("base_s", "1e300"), "base_s: must be less than or equal to 1000000, got 1e+300"),
        (profile("base_s", "0.0"), "base_s and decode_s must be 1e-09 together at least"),
        (profile("base_s", "1e-320"), "base_s and decode_s must be 1e-09 together at least"),
        (profile("max_model_len", "2e9"), "max_model_len: must be a valid integer, got 2000000000.0"),
        (profile("speed", "1"), "speed: is not known here"),
        (profile("like", '"tpu"'), "like: must be one of h200, a100, cpu, got 'tpu'"),
        (profile("like", "[1]"), "like: must be one of h200, a100, cpu, got [1]"),
        (("profile.toml", "="), "profile.toml: "),
        (("profile.toml", "x = " + "[" * 5000 + "]" * 5000), "its arrays or tables are nested too deeply"),
        (("tiers.toml", "x = " + "[" * 5000 + "]" * 5000), "its arrays or tables are nested too deeply"),
    ],
)
def test_a_mistake_in_a_file_is_one_line(tmp_path: Path, file: tuple[str, str | bytes], words: str):
    """It names the file, the line or table, the key, what it must be and what it is."""
    name, text = file
    result = simulate(tmp_path, {name: text})
    said = result.output.strip()
    assert result.exit_code == 2, said
    assert said.count("\n") == 0
    assert said.startswith("carousel simulate: ")
    assert str(tmp_path / name) in said
    assert words in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--policy", "lifo"), "there is no policy lifo"),
        (("--profile", "tpu"), "neither a file nor one of"),
        (("--slo", "standard"), "an SLO is"),
        (("--slo", "gold:ttft=1"), "there is no tier gold"),
        (("--rate", "0"), "the rate must be a number above 0, got 0.0"),
        (("--rate", "nan"), "the rate must be a number above 0, got nan"),
        (("--rate", "inf"), "the rate must be a number above 0, got inf"),
        (("--rate", "1e-320"), "must be at most 1e+12"),
        (
            ("--tiers", "none.toml"),
            "--tiers none.toml: there is no such file; it must be a TOML file with tables [tiers.",
        ),
        (
            ("--trace", "none.csv"),
            "--trace none.csv: there is no such file; it must be a CSV file with the columns arr",
        ),
        (("--trace", "."), "--trace . cannot be read: is a directory; it must be a CSV file"),
        (("--plot", "none/x.svg"), "--plot none/x.svg cannot be written: no such file or directory"),
    ],
)
def test_a_mistake_in_an_option_is_one_line(tmp_path: Path, options: tuple[str, ...], words: str):
    """It comes without a traceback."""
    result = simulate(tmp_path, {"trace.csv": f"{HEADER}\n1,ann,4,2\n"}, *options)
    said = result.output.strip()
    assert result.exit_code == 2, said
    assert said.count("\n") == 0
    assert said.startswith("carousel simulate: ")
    assert words in said
    assert "Errno" not in said


@pytest.mark.parametrize(
    "files",
    [
        {"trace.csv": f"\ufeff{HEADER}\n0,ann,4,2\n"},
        {"trace.csv": f"{HEADER},region\n0,ann,4,2,eu\n"},
        {"trace.csv": f",{HEADER}\n7,0,ann,4,2\n"},
        {"trace.csv": f"{HEADER},tier\n0,[/ann],4,2,[/x]\n"},
        {"tiers.toml": "\ufeff[tiers.'[/x]']\nweight = 2\nttft = 1\n"},
        {"profile.toml": PROFILE.replace("max_model_len = 400", "max_model_len = 2_000_000_000")},
    ],
)
def test_what_looks_odd_and_is_right(tmp_path: Path, files: dict[str, str]):
    """A byte order mark, columns of others, names that are markup elsewhere, a context longer than any memory."""
    result = simulate(tmp_path, files)
    assert result.exit_code == 0, result.output
    assert "1 of 1 finished" in result.output
    assert ("[/x]" in result.output) == ("[/x]" in "".join(files.values()))


def test_what_never_fits_is_refused_without_a_prompt_of_its_length(tmp_path: Path):
    """Within the context and beyond all blocks: it is refused, and nothing of its size is made."""
    files = {
        "profile.toml": PROFILE.replace("max_model_len = 400", "max_model_len = 2_000_000_000"),
        "trace.csv": f"{HEADER}\n0,ann,1000000000,2\n0,ann,1590,10\n",
    }
    assert "1 of 2 finished, 1 refused" in simulate(tmp_path, files).output
