"""Programs that are not ours, started beside a test."""

import contextlib
import subprocess


def end(*programs: subprocess.Popen, limit: float = 10) -> None:
    """SIGTERM to all, SIGKILL to those that have not ended `limit` seconds later; waits for each.

    How long Jaeger or Prometheus takes to end says nothing about us, and a process that is left behind fails another
    test with a ResourceWarning.
    """
    for program in programs:
        program.terminate()
    for program in programs:
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.wait(limit)
        program.kill()  # nothing, where it has ended
        program.wait()
