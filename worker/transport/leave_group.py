"""Takes members out of their consumer groups that cannot leave by themselves any more: their process has died.

The coordinator takes a LeaveGroup from any connection (research/kafka.md 0.6), and gives the partitions away at once
in place of after the session time-out. Imports little: the supervisor stays small.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from aiokafka.client import AIOKafkaClient, ConnectionGroup, CoordinationType
from aiokafka.errors import KafkaError, UnknownMemberIdError, for_code
from aiokafka.protocol.group import LeaveGroupRequest

RETRY_S = 0.1


async def leave_groups(options: Mapping[str, Any], members: Mapping[str, str], timeout: float) -> dict[str, str]:
    """Sends LeaveGroup for each member. Never raises for what Kafka does or does not do.

    Args:
        options: of an aiokafka client.
        members: group -> member id. Only of processes that are known to be dead.
        timeout: seconds for all of it.

    Returns:
        group -> why that member is still there, without those that have left (or had already).
    """
    failures = dict.fromkeys(members, f"no answer within {timeout:g} s")
    client = AIOKafkaClient(**options, request_timeout_ms=round(timeout * 1000))
    try:
        async with asyncio.timeout(timeout):
            await client.bootstrap()
            await asyncio.gather(*(_leave(client, group, member, failures) for group, member in members.items()))
    except TimeoutError:
        pass
    except KafkaError as e:
        failures = dict.fromkeys(failures, repr(e))
    finally:
        await client.close()
    return failures


async def _leave(client: AIOKafkaClient, group: str, member: str, failures: dict[str, str]) -> None:
    """Tries until it is done or refused for good; `failures` says how it stands."""
    while True:
        try:
            node = await client.coordinator_lookup(CoordinationType.GROUP, group)
            response = await client.send(node, LeaveGroupRequest(group, member), group=ConnectionGroup.COORDINATION)
            error = for_code(response.error_code)
            if not response.error_code or error is UnknownMemberIdError:
                del failures[group]
                return
            failures[group] = error.__name__
            if not error.retriable:
                return
        except KafkaError as e:
            failures[group] = repr(e)
            if not e.retriable:
                return
        await asyncio.sleep(RETRY_S)
