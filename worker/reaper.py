"""Clears up after callers that have gone, as a side task: `carousel reap` at intervals, by one worker at a time.

Whoever owns the first partition of the first lane does it: the group gives it to one worker at a time, and to another
one when that dies. A process of its own, so that nothing here waits while it reads.
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable

import structlog

from schemas.connection import KafkaConnection

MAX_INTERVAL_S = 600.0

log = structlog.get_logger(__name__)


class Reaper:
    """Runs `carousel reap` while `has_lease` says so.

    Args:
        age: seconds after the end of a request until its reply topic goes.
    """

    def __init__(
        self,
        connection: KafkaConnection,
        reply_prefix: str,
        lane_prefix: str,
        age: float,
        has_lease: Callable[[], bool],
    ) -> None:
        self._command = [sys.executable, "-m", "service", "reap", "--older-than", f"{age:.3f}s", "--yes", "--json"]
        self._command += ["--reply-prefix", reply_prefix, "--lane-prefix", lane_prefix]
        self._environment = os.environ | connection.environment()
        self._interval = min(age, MAX_INTERVAL_S)
        self._has_lease = has_lease

    async def run(self) -> None:
        """Until it is cancelled. What goes wrong is logged, and tried again at the next interval."""
        while True:
            await asyncio.sleep(self._interval)
            if self._has_lease():
                try:
                    await self._reap()
                except Exception:  # it must not take the worker with it
                    log.exception("reaper.failed")

    async def _reap(self) -> None:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self._environment,
        )
        try:
            output, errors = await process.communicate()
        except asyncio.CancelledError:
            process.terminate()
            await process.wait()
            raise
        if process.returncode:
            log.warning("reaper.failed", status=process.returncode, error=errors.decode(errors="replace")[-500:])
            return
        found = json.loads(output)
        log.info("reaper.done", deleted=len(found["ended"]), kept=found["kept"])
