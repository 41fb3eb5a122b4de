"""Records with neither key nor value: Kafka takes them, aiokafka's producer refuses to be given one."""

from typing import Final

NULL: Final = object()


def serialised(value: object) -> object:
    """A producer's `value_serializer`: it writes NULL as null, and everything else as it is."""
    return None if value is NULL else value
