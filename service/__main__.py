"""`python -m service` is `carousel`."""

from service.cli import main

if __name__ == "__main__":
    main()
