"""Runs seeded worlds (world.py): one seed, to replay a failure, or a resumable soak over many.

python -m worker.sim.fuzz --seed 7 --steps 5000
python -m worker.sim.fuzz --soak finished.jsonl --seeds 200 --steps 50000 --jobs 2
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from worker.sim.world import World


@dataclass(frozen=True, slots=True)
class Result:
    """What a seed's world came to."""

    seed: int
    steps: int  # asked for
    num_steps: int  # done: the last calm comes on top
    num_requests: int
    seconds: float  # CPU
    failure: str | None  # what failed, at which step, and how to replay it


def run_seed(seed: int, steps: int) -> Result:
    """Runs one world, every checker on. A failed assertion, or any other error, becomes a failure with its replay."""
    started = time.process_time()
    world = World(seed)
    failure = None
    try:
        world.run(steps)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        failure = (
            f"seed {seed} failed in step {world.num_steps + 1} at {world.now} s: {type(error).__name__}: {error}\n"
            f"  at {place.filename}:{place.lineno}\n"
            f"  replay: {replay_command(seed, steps)}"
        )
    return Result(seed, steps, world.num_steps, world.num_requests, time.process_time() - started, failure)


def replay_command(seed: int, steps: int) -> str:
    return f"python -m worker.sim.fuzz --seed {seed} --steps {steps}"


def replay(seed: int, steps: int) -> int:
    """Runs one seed and prints what came of it, with the traceback of a failure. Returns the exit status."""
    world = World(seed)
    try:
        world.run(steps)
    except Exception:
        traceback.print_exc()
        print(
            f"seed {seed} failed in step {world.num_steps + 1}; replay: {replay_command(seed, steps)}", file=sys.stderr
        )
        return 1
    print(f"seed {seed}: {world.num_steps} steps, {world.num_requests} requests, no failure")
    return 0


def soak(file: Path, seeds: Sequence[int], steps: int, jobs: int) -> Iterator[Result]:
    """Runs the seeds that `file` does not have with as many steps, and appends each that finishes, a JSON line each.

    So an interrupted soak goes on where it was. Failed seeds are not appended; they run again next time.
    """
    finished = finished_seeds(file, steps)
    with ProcessPoolExecutor(jobs) as pool:
        futures = [pool.submit(run_seed, seed, steps) for seed in seeds if seed not in finished]
        for future in as_completed(futures):
            result = future.result()
            if result.failure is None:
                fields = {"seed": result.seed, "steps": result.steps, "num_steps": result.num_steps}
                with file.open("a") as out:
                    out.write(json.dumps(fields | {"num_requests": result.num_requests}) + "\n")
            yield result


def finished_seeds(file: Path, steps: int) -> dict[int, int]:
    """The seeds that a soak's file has with at least `steps` steps, and how many each has done.

    A last line that an interruption cut short does not count.
    """
    done: dict[int, int] = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            fields = json.loads(line)
        except json.JSONDecodeError:
            continue
        if fields["steps"] >= steps:
            done[fields["seed"]] = max(fields["num_steps"], done.get(fields["seed"], 0))
    return done


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Its exit status is 0 only when no seed failed."""
    parser = argparse.ArgumentParser(prog="python -m worker.sim.fuzz", description="Seeded worlds around the engine.")
    parser.add_argument("--seed", type=int, default=0, help="the seed to run, or the first of a soak")
    parser.add_argument("--steps", type=int, default=5000, help="engine steps per seed")
    parser.add_argument("--soak", type=Path, metavar="FILE", help="run many; append those that finish; go on after")
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds a soak has")
    parser.add_argument("--jobs", type=int, default=1, help="processes of a soak")
    given = parser.parse_args(arguments)
    if given.soak is None:
        return replay(given.seed, given.steps)
    failed = False
    for result in soak(given.soak, range(given.seed, given.seed + given.seeds), given.steps, given.jobs):
        failed |= result.failure is not None
        print(result.failure or f"seed {result.seed}: {result.num_steps} steps, {result.seconds:.1f} s", flush=True)
    done = finished_seeds(given.soak, given.steps)
    print(f"{len(done)} seeds are finished, {sum(done.values())} steps in all")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
