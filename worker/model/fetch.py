"""Prepares a model ahead of the first start: `python -m worker.model.fetch smollm2`."""

import sys

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from worker.model.errors import ModelError
from worker.model.loader import load_model


def main(name: str) -> int:
    """Loads `name` once, which fills the caches, with a progress bar. Returns the exit status."""
    columns = TextColumn(name), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    try:
        with Progress(*columns) as bar:
            task = bar.add_task("starting", total=1.0)
            load_model(name, progress=lambda what, share: bar.update(task, description=what, completed=share))
    except ModelError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m worker.model.fetch NAME")
    sys.exit(main(sys.argv[1]))
