"""llama.cpp's server, asked over HTTP; standard library only."""

import contextlib
import http.client
import json
import re
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import peer_script

START_S = 120


@contextlib.contextmanager
def server(workload):
    """Its port, once it is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = {
        "model": workload["model"],
        "host": "127.0.0.1",
        "port": port,
        "parallel": workload["seats"],
        "ctx-size": workload["seats"] * workload["max_len"],
        "threads": workload["threads"],
        "threads-batch": workload["threads"],
        "cache-type-k": "f32",
        "cache-type-v": "f32",
    }
    arguments = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    process = subprocess.Popen([workload["server"], "--cont-batching", "--no-cache-prompt", *arguments])
    try:
        for _ in range(START_S * 10):
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with status {process.returncode}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == http.client.OK:
                    break
            time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    workload = peer_script.read_workload()
    version = subprocess.run([workload["server"], "--version"], capture_output=True, text=True, check=True)
    found = re.search(r"version: (.*)", version.stdout + version.stderr)

    with server(workload) as port:

        def ask(request, add):
            connection = http.client.HTTPConnection("127.0.0.1", port)
            body = {
                "prompt": request["token_ids"],
                "n_predict": request["max_tokens"],
                "temperature": 0.0,
                "ignore_eos": True,
                "stream": True,
                "return_tokens": True,
                "cache_prompt": False,
            }
            connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise RuntimeError(response.read().decode())
            for line in response:
                if line.startswith(b"data: "):
                    event = json.loads(line.removeprefix(b"data: "))
                    if not event.get("stop"):  # the last event has no token of its own
                        add(event["tokens"])

        def serve(requests, recorder):
            with ThreadPoolExecutor(len(requests)) as pool:
                asked = [pool.submit(ask, r, lambda ids, i=i: recorder.add(i, ids)) for i, r in enumerate(requests)]
            for answer in asked:
                answer.result()

        peer_script.run(workload, serve, {"llama.cpp": found.group(1) if found else "?"})


if __name__ == "__main__":
    main()
