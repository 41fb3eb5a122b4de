"""TLS to Kafka. Standard library only: the worker's supervisor uses it, too."""

import os
import ssl


def client_context(
    cafile: str | os.PathLike[str] | None,
    certfile: str | os.PathLike[str] | None,
    keyfile: str | os.PathLike[str] | None,
    check_hostname: bool,
) -> ssl.SSLContext:
    """A client's context. PEM files; without `cafile` the system's authorities count. Raises ValueError that names
    the file that cannot be used."""
    try:
        context = ssl.create_default_context(cafile=cafile)
    except OSError as error:  # ssl.SSLError is one
        raise ValueError(f"ssl_cafile {cafile} cannot be used: {error}") from error
    context.check_hostname = check_hostname
    if certfile is not None:
        try:
            context.load_cert_chain(certfile, keyfile)
        except OSError as error:
            raise ValueError(f"ssl_certfile {certfile} or its key cannot be used: {error}") from error
    return context
