"""The command that says what viewers of the live page cost runs, and its viewers come and go."""

import re
import socket
import subprocess
import sys


def test_it_measures_with_and_without_viewers() -> None:
    """Two palindromes of a small engine: steps of both kinds, and the page's part where somebody looked on."""
    command = [sys.executable, "-m", "bench.console_cost", "--seats", "8", "--blocks", "256", "--viewers", "2"]
    command += ["--rounds", "1", "--palindromes", "2", "--seconds", "0.5", "--warm-up", "0.2"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True).stdout
    kinds = re.search(r"alone [\d.]+ ms, watched [\d.]+ ms: .*; (\d+) and (\d+) steps", said)
    assert kinds is not None, said
    assert min(map(int, kinds.groups())) >= 4, "each of the four turns has a step"
    assert re.search(
        r"2 viewers: ([-+][\d.]+%) CPU seconds a step \(median of 1, \1 \.\. \1\); goal: at most \+1 %", said
    )
    snapshots = re.search(r"a snapshot, with all its viewers: ([\d.]+) ms of CPU; (\d+) of them", said)
    assert snapshots is not None, said
    assert int(snapshots[2]) >= 4, "a watched turn has whole periods"
    if sys.platform == "linux":
        assert float(snapshots[1]) > 0


def test_viewers_come_and_go() -> None:
    """So many connect at `open`, all leave at `close`, again and again; the process ends with its input."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)
        command = [sys.executable, "-m", "bench.viewers", str(server.getsockname()[1]), "3"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, text=True, bufsize=1) as child:
            assert child.stdin is not None
            for _ in range(2):
                print("open", file=child.stdin)
                seen = [server.accept()[0] for _ in range(3)]
                for connection in seen:
                    assert connection.recv(1 << 16).startswith(b"GET /events HTTP/1.1\r\n")
                print("close", file=child.stdin)
                for connection in seen:
                    with connection:
                        connection.settimeout(30)
                        assert connection.recv(1 << 16) == b"", "it has left"
            child.stdin.close()
            assert child.wait(30) == 0
