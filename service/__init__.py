"""What callers touch: client, command line, embedded broker. Knows the contract (schemas), never the worker."""
