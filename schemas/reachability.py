"""Why Kafka cannot be reached, in a sentence: aiokafka 0.14 has one error for every cause.

A connection of our own is tried, which fails with the cause itself. Brokers are silent about the commonest mistakes:
they close a connection that does not speak their language, so what language that is must be tried, too.
"""

import asyncio
import contextlib
import errno
import socket
import ssl

from aiokafka.conn import AIOKafkaConnection, create_conn
from aiokafka.errors import (
    IllegalSaslStateError,
    KafkaConnectionError,
    KafkaError,
    SaslAuthenticationFailed,
    UnsupportedSaslMechanismError,
)
from aiokafka.protocol.metadata import MetadataRequest

from schemas.connection import KafkaConnection

TRY_S = 5.0
_HOSTNAME_MISMATCH = 62  # OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH


async def why_unreachable(connection: KafkaConnection) -> str:
    """What is wrong with the first server of `connection` that cannot be used, and what to change. Raises nothing."""
    return await whats_wrong(connection) or "it answered when asked again: the failure may pass"


async def whats_wrong(connection: KafkaConnection) -> str | None:
    """The same; None: every server can be used."""
    for server in connection.bootstrap.split(","):
        host, _, port = server.strip().rpartition(":")
        if (cause := await _try(connection, host.strip("[]"), int(port))) is not None:
            return cause
    return None


async def _try(connection: KafkaConnection, host: str, port: int) -> str | None:
    """None: it can be used."""
    opened: AIOKafkaConnection | None = None
    try:
        async with asyncio.timeout(TRY_S):
            options = connection.client_options()
            del options["bootstrap_servers"]
            opened = await create_conn(
                host, port, client_id="carousel-why", request_timeout_ms=round(TRY_S * 1000), **options
            )
            await opened.send(MetadataRequest([]))
    except Exception as error:  # whatever it is, it is the answer
        return await _sentence(error, connection, host, port)
    finally:
        if opened is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(opened.close(), TRY_S)
    return None


async def _sentence(error: Exception, connection: KafkaConnection, host: str, port: int) -> str:
    match error:
        case SaslAuthenticationFailed():
            return f"the broker does not accept the user {connection.sasl_username!r} with this password"
        case UnsupportedSaslMechanismError():
            return f"the broker does not offer the sasl_mechanism {connection.sasl_mechanism or 'PLAIN'}"
        case IllegalSaslStateError():
            return "the broker wants no user and password there: security_protocol must be PLAINTEXT or SSL"
        case ssl.SSLCertVerificationError(verify_code=code) if code == _HOSTNAME_MISMATCH:
            return f"the broker's certificate is not for {host}: {error.verify_message}"
        case ssl.SSLCertVerificationError():
            return (
                f"the broker's certificate is not trusted ({error.verify_message}): ssl_cafile must name the authority "
                "that signed it"
            )
        case socket.gaierror():
            return f"there is no host {host}: {error.strerror}"
        case OSError() if _refused(error):
            return "nobody listens there" + _local_broker(connection, host, port)
        case ssl.SSLError() | ConnectionError() | KafkaConnectionError():
            return await _closed(error, connection, host, port)
        case TimeoutError():
            return f"no answer within {TRY_S:g} s"
        case KafkaError() | OSError() | ValueError():
            return str(error) or repr(error)
    return repr(error)


def _refused(error: OSError) -> bool:
    """localhost has two addresses: asyncio gives the errors of both as one text."""
    words = str(error)
    return isinstance(error, ConnectionRefusedError) or (
        words.startswith("Multiple exceptions")
        and words.count("[Errno") == words.count(f"[Errno {errno.ECONNREFUSED}]")
    )


def _local_broker(connection: KafkaConnection, host: str, port: int) -> str:
    """How to get a broker there, where that is this machine and the embedded one would do."""
    if connection.security_protocol != "PLAINTEXT" or not (host in ("localhost", "::1") or host.startswith("127.")):
        return ""
    address = f"[{host}]:{port}" if ":" in host else f"{host.replace('localhost', '127.0.0.1')}:{port}"
    return f". For first steps, start one in another terminal: carousel broker --listen {address}"


async def _closed(error: Exception, connection: KafkaConnection, host: str, port: int) -> str:
    """The broker has hung up without a word."""
    has_tls = await _speaks_tls(host, port)
    wants = "SASL_SSL" if connection.uses_sasl else "SSL (or SASL_SSL, with a user)"
    if has_tls and not connection.uses_tls:
        return f"the broker speaks TLS there: security_protocol must be {wants}, not {connection.security_protocol}"
    if connection.uses_tls and not has_tls:
        return f"the broker speaks no TLS there, which security_protocol {connection.security_protocol} needs"
    if not connection.uses_sasl:
        or_else = " or a certificate of the client (ssl_certfile)" if has_tls and not connection.ssl_certfile else ""
        return (
            f"the broker closes the connection: it probably wants a user and a password{or_else}; security_protocol is "
            f"{connection.security_protocol}"
        )
    return f"the broker closes the connection: {error}"


async def _speaks_tls(host: str, port: int) -> bool:
    anything = ssl.create_default_context()
    anything.check_hostname = False
    anything.verify_mode = ssl.CERT_NONE  # nothing is sent; who it is does not matter here
    try:
        async with asyncio.timeout(TRY_S):
            _, writer = await asyncio.open_connection(host, port, ssl=anything)
    except (OSError, TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True
