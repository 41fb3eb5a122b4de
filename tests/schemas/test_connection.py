"""How Kafka is reached: validation, environment and what aiokafka gets."""

import ssl
from pathlib import Path

import pytest
from pydantic import ValidationError

from schemas.connection import KafkaConnection, KafkaSettings, connection_from_env


def complaint(**fields: object) -> str:
    with pytest.raises(ValidationError) as caught:
        KafkaConnection.model_validate(fields)
    return str(caught.value)


def test_a_plain_connection_needs_nothing() -> None:
    """localhost without TLS or SASL."""
    assert KafkaConnection().client_options() == {
        "bootstrap_servers": ["localhost:9092"],
        "security_protocol": "PLAINTEXT",
    }
    several = KafkaConnection(bootstrap="a:1, [::1]:2")
    assert several.client_options()["bootstrap_servers"] == ["a:1", "[::1]:2"]


def test_sasl_over_tls_passes_everything_on() -> None:
    """The names are those of aiokafka's constructors; PLAIN is the default mechanism."""
    connection = KafkaConnection.model_validate(
        {"security_protocol": "SASL_SSL", "sasl_username": "u", "sasl_password": "secret", "ssl_check_hostname": False}
    )
    options = connection.client_options()
    context = options.pop("ssl_context")
    assert isinstance(context, ssl.SSLContext)
    assert (context.check_hostname, context.verify_mode) == (False, ssl.CERT_REQUIRED)
    assert options == {
        "bootstrap_servers": ["localhost:9092"], "security_protocol": "SASL_SSL", "sasl_mechanism": "PLAIN",
        "sasl_plain_username": "u", "sasl_plain_password": "secret",
    }  # fmt: skip
    assert "secret" not in repr(connection)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"bootstrap": "nowhere"}, "bootstrap must be host:port"),
        ({"bootstrap": "a:1,"}, "bootstrap must be host:port"),
        ({"bootstrap": "a:99999"}, "bootstrap must be host:port"),
        ({"security_protocol": "SASL_SSL"}, "SASL_SSL needs sasl_username and sasl_password"),
        ({"sasl_username": "u"}, "set security_protocol to SASL_SSL or SASL_PLAINTEXT"),
        ({"ssl_cafile": "ca.pem"}, "set security_protocol to SSL or SASL_SSL"),
        ({"security_protocol": "SSL", "ssl_keyfile": "k.pem"}, "ssl_keyfile needs ssl_certfile"),
    ],
)
def test_settings_that_do_not_belong_together_are_refused(fields: dict[str, object], sentence: str) -> None:
    """The error says what to do; a setting without effect is an error, too."""
    assert sentence in complaint(**fields)


def test_a_bad_tls_file_is_named(tmp_path: Path) -> None:
    """Missing files and files that are no certificate."""
    missing = tmp_path / "missing.pem"
    with pytest.raises(ValueError, match=r"ssl_cafile .*missing.pem cannot be used"):
        KafkaConnection(security_protocol="SSL", ssl_cafile=missing).client_options()
    with pytest.raises(ValueError, match=r"ssl_certfile .*missing.pem or its key"):
        KafkaConnection(security_protocol="SSL", ssl_certfile=missing).client_options()


def test_the_environment_sets_every_field(monkeypatch: pytest.MonkeyPatch) -> None:
    """CAROUSEL_<FIELD>; an empty variable counts as unset; an argument wins."""
    environ = {
        "CAROUSEL_BOOTSTRAP": "b:9",
        "CAROUSEL_SECURITY_PROTOCOL": "SASL_PLAINTEXT",
        "CAROUSEL_SASL_MECHANISM": "SCRAM-SHA-512",
        "CAROUSEL_SASL_USERNAME": "u",
        "CAROUSEL_SASL_PASSWORD": "p",
        "CAROUSEL_SSL_CAFILE": "",
    }
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    settings = KafkaSettings()
    assert settings.client_options()["sasl_mechanism"] == "SCRAM-SHA-512"
    assert connection_from_env(environ).client_options() == settings.client_options()
    assert KafkaSettings(bootstrap="c:1").bootstrap == "c:1"
    assert connection_from_env({}) == KafkaConnection()
