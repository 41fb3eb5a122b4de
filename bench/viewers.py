"""Readers of a live page's events: python -m bench.viewers PORT NUMBER. Imports little, so that it starts at once."""

import sys
import threading
import urllib.request


def main() -> None:
    port, number = map(int, sys.argv[1:])

    def read() -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/events") as response:
            while response.read1(1 << 20):
                pass

    threads = [threading.Thread(target=read) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
