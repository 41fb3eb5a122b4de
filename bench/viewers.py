"""Readers of a live page's events, which come and go: python -m bench.viewers PORT NUMBER.

Reads commands, one a line: `open`, and all look on; `close`, and none does. Ends with its input. Imports little, so
that it starts at once.
"""

import contextlib
import socket
import sys
import threading

REQUEST = b"GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: text/event-stream\r\n\r\n"


def main() -> None:
    port, number = map(int, sys.argv[1:])
    connections: list[socket.socket] = []
    for line in sys.stdin:
        for connection in connections:
            with contextlib.suppress(OSError):  # the page has ended it
                connection.shutdown(socket.SHUT_RDWR)
        connections = []
        if line == "open\n":
            connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(number)]
            for connection in connections:
                threading.Thread(target=_look, args=(connection,), daemon=True).start()


def _look(connection: socket.socket) -> None:
    with connection:
        connection.sendall(REQUEST)
        while connection.recv(1 << 20):
            pass


if __name__ == "__main__":
    main()
