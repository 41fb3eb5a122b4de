"""The options that say how to reach Kafka: declared once, shared by the commands."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from schemas.connection import ENV_PREFIX, KafkaConnection, SaslMechanism, SecurityProtocol

_KINDS: dict[str, Any] = {
    "security_protocol": SecurityProtocol,
    "sasl_mechanism": SaslMechanism,
    "ssl_cafile": Path,
    "ssl_certfile": Path,
    "ssl_keyfile": Path,
    "ssl_check_hostname": bool,
}  # the others are strings


def with_connection(command: Callable[..., None], *, without: str | None = None) -> Callable[..., None]:
    """A command with the options above, and what they say as its argument `connection`, a KafkaConnection.

    without: the command needs no Kafka, and this is what the help says it does then; `connection` may be None.
    """

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        given = {name: arguments.pop(name) for name in KafkaConnection.model_fields}
        given = {name: value for name, value in given.items() if value is not None}
        if without is not None and "bootstrap" not in given:
            return command(connection=None, **arguments)
        try:
            connection = KafkaConnection(**given)
        except ValidationError as error:
            raise typer.BadParameter("; ".join(_sentence(dict(fault)) for fault in error.errors())) from None
        return command(connection=connection, **arguments)

    own = inspect.signature(command).parameters.values()
    parameters = [parameter for parameter in own if parameter.name != "connection"]
    for name, field in KafkaConnection.model_fields.items():
        kind = _KINDS.get(name, str)
        option = typer.Option(
            help=field.description,
            envvar=ENV_PREFIX + name.upper(),
            show_default=(without or "localhost:9092") if name == "bootstrap" else False,
            rich_help_panel="Kafka (or in the environment: CAROUSEL_BOOTSTRAP, ...)",
            show_envvar=False,
        )
        parameters.append(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
            )
        )
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _sentence(fault: dict[str, Any]) -> str:
    names = ", ".join(f"--{str(name).replace('_', '-')}" for name in fault["loc"])
    message = str(fault["msg"]).removeprefix("Value error, ")
    return f"{names}: {message}" if names else message
