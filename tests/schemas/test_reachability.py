"""Why Kafka cannot be reached, in a sentence that says what to do."""

import socket

import pytest

from schemas import reachability
from schemas.connection import KafkaConnection
from schemas.reachability import why_unreachable


@pytest.mark.parametrize(("host", "listen"), [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1")])
async def test_where_nobody_listens_on_this_machine_a_broker_can_be_started(host: str, listen: str) -> None:
    """The sentence ends with the command, for that very address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    why = await why_unreachable(KafkaConnection(bootstrap=f"{host}:{port}"))
    assert why.startswith("nobody listens there. ")
    assert why.endswith(f": carousel broker --listen {listen}:{port}")


@pytest.mark.parametrize(
    ("host", "security", "sentence"),
    [
        ("::1", "PLAINTEXT", "nobody listens there. For first steps, start one in another terminal: carousel broker "),
        ("10.0.0.7", "PLAINTEXT", "nobody listens there"),
        ("127.0.0.1", "SSL", "nobody listens there"),
    ],
)
async def test_elsewhere_a_broker_of_ours_would_not_help(host: str, security: str, sentence: str) -> None:
    """Another machine, or TLS, which the embedded broker does not speak: only the cause."""
    connection = KafkaConnection.model_validate({"bootstrap": f"[{host}]:1", "security_protocol": security})
    why = await reachability._sentence(ConnectionRefusedError(111, "x"), connection, host, 1)
    assert why.startswith(sentence)
    assert ("carousel broker" in why) == (sentence != "nobody listens there")


@pytest.mark.parametrize(
    ("second", "sentence"), [("[Errno 111] Connect call failed", "nobody listens"), ("[Errno 113] No route", "Multi")]
)
async def test_both_addresses_of_localhost(second: str, sentence: str) -> None:
    """asyncio puts what failed at each address into one text; only where all refuse nobody listens."""
    error = OSError(f"Multiple exceptions: [Errno 111] Connect call failed ('::1', 1, 0, 0), {second}")
    why = await reachability._sentence(error, KafkaConnection(), "localhost", 1)
    assert why.startswith(sentence)
