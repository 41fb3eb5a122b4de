"""Side-by-side measurements, each a command: `python -m bench.mixed --help`."""
