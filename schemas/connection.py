"""How to reach Kafka: address, TLS and SASL, as the client, the worker and the tools share it. No Kafka client here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from schemas.tls import client_context

SecurityProtocol = Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]
SaslMechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]

ENV_PREFIX = "CAROUSEL_"
CONNECT_S = 15.0  # for a first answer: whoever takes connections and says nothing would be waited for far longer


class KafkaConnection(BaseModel):
    """Validated: a field that its security protocol would ignore is an error, and so is one that it lacks."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    bootstrap: str = Field("localhost:9092", description="Kafka's address: HOST:PORT, several with commas.")
    security_protocol: SecurityProtocol = Field("PLAINTEXT", description="With or without TLS and SASL.")
    sasl_mechanism: SaslMechanism | None = Field(None, description="With SASL. Default: PLAIN.")
    sasl_username: str | None = Field(None, description="With SASL: the user.")
    sasl_password: SecretStr | None = Field(
        None, description="With SASL: the password. Better in the environment: flags can be seen by everybody."
    )
    ssl_cafile: Path | None = Field(
        None, description="With TLS: authorities to trust, a PEM file. Default: the system's."
    )
    ssl_certfile: Path | None = Field(None, description="With TLS: this client's certificate, a PEM file.")
    ssl_keyfile: Path | None = Field(None, description="With TLS: the key of --ssl-certfile, a PEM file.")
    ssl_check_hostname: bool = Field(True, description="With TLS: the broker's certificate must name its host.")

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        for server in self.bootstrap.split(","):
            host, colon, port = server.strip().rpartition(":")
            if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
                raise ValueError(f"bootstrap must be host:port, or several with commas; {server.strip()!r} is neither")
        has_sasl = any(value is not None for value in (self.sasl_mechanism, self.sasl_username, self.sasl_password))
        if self.uses_sasl and (self.sasl_username is None or self.sasl_password is None):
            raise ValueError(f"{self.security_protocol} needs sasl_username and sasl_password")
        if has_sasl and not self.uses_sasl:
            raise ValueError("set security_protocol to SASL_SSL or SASL_PLAINTEXT to use the sasl_* settings")
        if not self.uses_tls and any((self.ssl_cafile, self.ssl_certfile, self.ssl_keyfile)):
            raise ValueError("set security_protocol to SSL or SASL_SSL to use the ssl_* settings")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("ssl_keyfile needs ssl_certfile")
        return self

    @property
    def uses_sasl(self) -> bool:
        return self.security_protocol.startswith("SASL_")

    @property
    def uses_tls(self) -> bool:
        return self.security_protocol.endswith("SSL")

    def tls_files(self) -> dict[str, Any] | None:
        """What `schemas.tls.client_context` needs; None without TLS."""
        if not self.uses_tls:
            return None
        return {
            "cafile": self.ssl_cafile,
            "certfile": self.ssl_certfile,
            "keyfile": self.ssl_keyfile,
            "check_hostname": self.ssl_check_hostname,
        }

    def environment(self) -> dict[str, str]:
        """The connection as CAROUSEL_* variables, for a process of ours; not as flags, which everybody can see."""
        values = {name: getattr(self, name) for name in KafkaConnection.model_fields}
        values["sasl_password"] = self.sasl_password.get_secret_value() if self.sasl_password else None
        return {ENV_PREFIX + name.upper(): str(value) for name, value in values.items() if value is not None}

    def client_options(self) -> dict[str, Any]:
        """Keyword arguments for aiokafka's constructors. Reads the TLS files; a bad one: ValueError that names it."""
        options: dict[str, Any] = {
            "bootstrap_servers": [server.strip() for server in self.bootstrap.split(",")],
            "security_protocol": self.security_protocol,
        }
        if self.uses_sasl and self.sasl_password is not None:
            options["sasl_mechanism"] = self.sasl_mechanism or "PLAIN"
            options["sasl_plain_username"] = self.sasl_username
            options["sasl_plain_password"] = self.sasl_password.get_secret_value()
        if files := self.tls_files():
            options["ssl_context"] = client_context(**files)
        return options


class KafkaSettings(KafkaConnection, BaseSettings):
    """The connection of this process: CAROUSEL_BOOTSTRAP, CAROUSEL_SECURITY_PROTOCOL, ..., a variable per field."""

    model_config = SettingsConfigDict(
        frozen=True, extra="ignore", hide_input_in_errors=True, env_prefix=ENV_PREFIX, env_ignore_empty=True
    )


def connection_from_env(environ: Mapping[str, str]) -> KafkaConnection:
    """The same from a given environment; an empty variable counts as unset. Raises pydantic's ValidationError."""
    named = {name: environ.get(ENV_PREFIX + name.upper()) for name in KafkaConnection.model_fields}
    return KafkaConnection.model_validate({name: value for name, value in named.items() if value})
