"""`carousel worker` as the command that becomes a supervisor."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from worker import supervisor
from worker.cli import command
from worker.supervisor import Settings


class Became(Exception):
    """The process would be another program now."""


@pytest.fixture
def became(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Settings, Sequence[str]]]:
    """What the process became the supervisor with."""
    calls: list[tuple[Settings, Sequence[str]]] = []

    def become(settings: Settings, words: Sequence[str]) -> None:
        calls.append((settings, words))
        raise Became

    monkeypatch.setattr(supervisor, "become_supervisor", become)
    return calls


def test_the_worker_gets_the_flags_and_the_supervisor_the_connection(became: list):
    """Every flag is passed on; the password from the environment is not on any command line."""
    flags = ["--model", "tiny", "--max-num-seqs=8", "--no-prefix-caching", "--drain-timeout", "20.5"]
    flags += ["--bootstrap", "a:1,b:2", "--security-protocol", "SASL_PLAINTEXT", "--sasl-username", "me"]
    result = CliRunner(env={"CAROUSEL_SASL_PASSWORD": "secret"}).invoke(command, flags)
    assert isinstance(result.exception, Became), result.output
    ((settings, words),) = became
    assert words[1:3] == ["-m", "worker"]
    expected = {"--model=tiny", "--max-num-seqs=8", "--no-prefix-caching", "--drain-timeout=20.5", "--no-supervisor"}
    assert expected <= set(words)
    assert settings.kafka["bootstrap_servers"] == ["a:1", "b:2"]
    assert settings.kafka["sasl_plain_password"] == "secret"
    assert "secret" not in " ".join(words)
    assert settings.tls is None
    assert settings.kill_after == 72.0


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--drain-timeout", "60"], "drain_timeout must be shorter than rebalance_timeout_ms"),
        (["--stop-grace-period", "60"], "rebalance_timeout_ms must be shorter than stop_grace_period"),
        (["--metrics-port", "70000"], "--metrics-port"),
        (["--stuck-after", "0"], "--stuck-after"),
        (["--security-protocol", "SSL", "--ssl-cafile", "/nowhere.pem"], "ssl_cafile /nowhere.pem cannot be used"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(flags: list[str], sentence: str, became: list):
    """drain_timeout < rebalance_timeout < stop_grace_period, and so on: status 2 and a sentence."""
    result = CliRunner().invoke(command, ["--model", "tiny", *flags])
    assert result.exit_code == 2
    assert sentence in result.output
    assert became == []


@pytest.mark.parametrize("text", ["x = ", "x = " + "[" * 5000 + "]" * 5000])
def test_a_configuration_file_that_is_no_toml(tmp_path: Path, text: str, became: list):
    """Status 2 and a sentence, however it is broken."""
    (tmp_path / "worker.toml").write_text(text)
    result = CliRunner().invoke(command, ["--config", str(tmp_path / "worker.toml")])
    assert result.exit_code == 2
    assert "the configuration file cannot be read" in result.output
    assert not became
