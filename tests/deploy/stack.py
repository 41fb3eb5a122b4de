"""docker-compose.yml as Docker Compose itself resolves it, and our commands as our own command line reads them."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import typer

from bench.beside import tool
from service.cli import app
from worker.cli import command as worker_command

ROOT = Path(__file__).resolve().parents[2]
PROFILES = ("cpu", "gpu", "obs", "ui", "client")


def resolve(*profiles: str, env_file: str = ".env.example", **variables: str) -> dict[str, Any]:
    """The resolved file. Raises Missing where there is no Compose, CalledProcessError for what it refuses."""
    words = [str(tool("docker-compose")), "-f", "docker-compose.yml", "--env-file", env_file]
    for profile in profiles:
        words += ["--profile", profile]
    words += ["config", "--format", "json"]
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "COMPOSE_PROFILES": ""} | variables
    answer = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=60)
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


def parse_command(words: list[str]) -> dict[str, Any]:
    """The options and arguments of `carousel WORDS` as the command would get them. Raises UsageError for what no
    command takes."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("carousel", list(words))
    while hasattr(command, "commands"):
        name, inner, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        # It hands everything to a command of its own.
        command = typer.main.get_command(worker_command) if name == "worker" else inner
        context = command.make_context(name, rest, parent=context)
    return dict(context.params)
