"""What the scripts of all peers share: the workload in, the answers out. Standard library only.

A script runs in its peer's own environment, as `python SCRIPT WORKLOAD.json RESULT.json`. Lines `@tokens N` on standard
output tell how many more output tokens there are.
"""

import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_REPORT_S = 0.25


class Recorder:
    """Takes the tokens of each request as they come, from any thread.

    Times are seconds after its creation, when all are submitted.
    """

    def __init__(self, requests: Sequence[dict[str, Any]]) -> None:
        self._wanted = [request["max_tokens"] for request in requests]
        self.answers: list[dict[str, Any]] = [{"token_ids": [], "ttft": 0.0, "latency": 0.0} for _ in requests]
        self._submitted = self._reported = time.perf_counter()
        self._num_unreported = 0
        self._lock = threading.Lock()

    def add(self, request: int, token_ids: Sequence[int]) -> None:
        """More tokens of a request, by its number."""
        now, answer = time.perf_counter(), self.answers[request]
        if not token_ids:
            return
        if not answer["token_ids"]:
            answer["ttft"] = now - self._submitted
        answer["token_ids"] += [int(token_id) for token_id in token_ids]
        answer["latency"] = now - self._submitted
        with self._lock:
            self._num_unreported += len(token_ids)
            if now - self._reported >= _REPORT_S:
                print(f"@tokens {self._num_unreported}", flush=True)
                self._num_unreported, self._reported = 0, now

    @property
    def complete(self) -> bool:
        """Every request has its number of tokens. Raises RuntimeError if one has more."""
        lens = [len(answer["token_ids"]) for answer in self.answers]
        for request, (length, wanted) in enumerate(zip(lens, self._wanted, strict=True)):
            if length > wanted:
                raise RuntimeError(f"request {request} has {length} tokens, {wanted} were asked for")
        return lens == self._wanted


# Serves requests ({token_ids, max_tokens}), all submitted at once, and tells a recorder of their tokens.
Serve = Callable[[Sequence[dict[str, Any]], Recorder], None]


def run(workload: dict[str, Any], serve: Serve, versions: dict[str, str]) -> None:
    """Serves the warm-up, then the workload, and writes the answers. Raises RuntimeError if tokens are missing."""
    for requests in [workload["warm_up"]], workload["requests"]:
        recorder = Recorder(requests)
        serve(requests, recorder)
        if not recorder.complete:
            raise RuntimeError("not every request has as many tokens as it was to have")
    Path(sys.argv[2]).write_text(json.dumps({"answers": recorder.answers, "versions": versions}))


def read_workload() -> dict[str, Any]:
    """{model, requests, warm_up, seats, threads, max_len: tokens of the longest request with its answer, ...}"""
    workload: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    return workload
