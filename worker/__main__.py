"""`python -m worker` is `carousel worker`."""

from worker.cli import main

if __name__ == "__main__":
    main()
