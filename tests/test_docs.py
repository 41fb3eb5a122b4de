"""The documents are true where a test can tell: commands parse, snippets compile, links lead somewhere."""

import ast
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
import yaml

from tests.deploy.stack import ROOT, parse_command
from worker.configuration import page

DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
IDS = [file.name for file in DOCUMENTS]
SHELL = ("", "sh", "bash")
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"""(?:^|[;&|(]\s*|\bdo\s+)(?:\.venv/bin/)?carousel\s+((?:"[^"]*"|'[^']*'|[^|;&>#\n])*)""")
USAGE_ERROR = typer.BadParameter.__base__  # of whichever click typer brings


def blocks(file: Path) -> Iterator[tuple[str, str]]:
    """(language, content) of the fenced blocks."""
    for match in FENCED.finditer(file.read_text()):
        yield match[1], match[2]


def command_lines(file: Path) -> Iterator[str]:
    for language, content in blocks(file):
        if language in SHELL:
            yield from content.replace("\\\n", " ").splitlines()


def carousel_commands(line: str) -> Iterator[list[str]]:
    """The words of every `carousel` in a line of shell: at its beginning, after `do`, a separator or an assignment."""
    for match in COMMAND.finditer(line.replace("$(", "( ")):
        yield shlex.split(match[1])


def inline_commands(file: Path) -> Iterator[list[str]]:
    """Those in the text that are meant literally."""
    text = FENCED.sub("", file.read_text())
    for words in re.findall(r"`carousel ([a-z][^`]*)`", text):
        if not re.search(r"[\[\]{}|…]|\.\.\.|\b[A-Z]{2,}\b", words):
            yield shlex.split(words)


def _takes(words: list[str]) -> None:
    try:
        parse_command(words)
    except typer.Exit:
        assert "--help" in words or "--version" in words
    except USAGE_ERROR as error:
        raise AssertionError(f"carousel {shlex.join(words)}: {error}") from None


@pytest.mark.parametrize("file", DOCUMENTS, ids=IDS)
def test_commands_in_blocks_are_taken(file: Path):
    """Every `carousel ...` in a fenced block: the command exists, and so do its options."""
    for line in command_lines(file):
        for words in carousel_commands(line):
            _takes(words)


@pytest.mark.parametrize("file", DOCUMENTS, ids=IDS)
def test_commands_in_the_text_exist(file: Path):
    """What is named in passing may lack arguments, but not exist only on paper."""
    for words in inline_commands(file):
        try:
            parse_command(words)
        except typer.Exit:
            pass
        except USAGE_ERROR as error:
            if type(error).__name__ not in ("MissingParameter", "BadOptionUsage"):
                raise AssertionError(f"carousel {shlex.join(words)}: {error}") from None


def test_wrong_commands_are_found_out():
    """The checks above can fail, and find a command wherever it stands in a line."""
    line = (
        'for i in 1 2; do carousel submit "a | b" --tier x > out & done; carousel status --json | jq .; carousel nope'
    )
    assert list(carousel_commands(line)) == [["submit", "a | b", "--tier", "x"], ["status", "--json"], ["nope"]]
    with pytest.raises(AssertionError, match="nope"):
        _takes(["nope"])
    with pytest.raises(AssertionError, match="--teir"):
        _takes(["submit", "x", "--teir", "y"])
    found = [words for file in DOCUMENTS for line in command_lines(file) for words in carousel_commands(line)]
    assert len(found) >= 15
    assert len([words for file in DOCUMENTS for words in inline_commands(file)]) >= 15


@pytest.mark.parametrize("file", DOCUMENTS, ids=IDS)
def test_other_commands_exist(file: Path):
    """`make` targets, `python -m` modules, services of `docker compose`."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    text = file.read_text()
    for line in [*command_lines(file), *re.findall(r"`([^`\n]+)`", text)]:
        for target in re.findall(r"^make ([a-z-]+)$", line):
            assert target in targets, line
        for module in re.findall(r"python -m ((?:bench|worker|service|schemas|kernels|tests)[\w.]*)", line):
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), line
        if match := re.match(r"docker compose (run --rm|exec|kill|stop|up --detach) (\S+)", line):
            assert match[2] in services, line


@pytest.mark.parametrize("file", DOCUMENTS, ids=IDS)
def test_snippets_are_well_formed(file: Path):
    """Python compiles, YAML, TOML and JSON parse."""
    for language, content in blocks(file):
        match language:
            case "python":
                ast.parse(content)
            case "yaml":
                list(yaml.safe_load_all(content))
            case "toml":
                tomllib.loads(content)
            case "json":
                json.loads(content)


@pytest.mark.parametrize("file", DOCUMENTS, ids=IDS)
def test_links_lead_somewhere(file: Path):
    """Relative links and pictures are files of the repository; a fragment is a heading of the file."""
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", file.read_text())):
        if re.match(r"https?:", target):
            continue
        name, _, fragment = target.partition("#")
        path = (file.parent / name).resolve() if name else file
        assert path.exists(), target
        if fragment:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert fragment in slugs, target


def test_the_configuration_page_is_generated():
    """`make configuration` changes nothing."""
    assert (ROOT / "docs/configuration.md").read_text() == page(), "make configuration"


def test_the_keda_example_asks_for_a_metric_that_exists():
    """Its query is of docs/metrics.md, and its limits are those of the worker."""
    (scaled,) = [
        yaml.safe_load(content)
        for language, content in blocks(ROOT / "docs/operations.md")
        if language == "yaml" and "ScaledObject" in content
    ]
    (trigger,) = scaled["spec"]["triggers"]
    metric, label = re.findall(r"max\((\w+)\{(\w+)=", trigger["metadata"]["query"])[0]
    rows = [line for line in (ROOT / "docs/metrics.md").read_text().splitlines() if line.startswith(f"| `{metric}` |")]
    assert len(rows) == 1
    assert f"`{label}`" in rows[0]
    assert scaled["spec"]["maxReplicaCount"] == parse_command(["topics", "create"])["partitions"]
