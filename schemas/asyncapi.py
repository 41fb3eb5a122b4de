"""The contract as an AsyncAPI 3.0 document, generated from the models that the code validates with.

`python -m schemas.asyncapi` prints it; docs/asyncapi.json is that output, and a test keeps it so. Payload schemas are
JSON Schema draft 7, AsyncAPI's own dialect; they describe the map, which travels as msgpack or JSON.
"""

import json
import sys
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from schemas.codec import ContentType
from schemas.dead_letters import CUT_HEADERS, CUT_KEY, CUT_VALUE
from schemas.headers import (
    CORRELATION_ID_NAMES,
    REPLY_PARTITION_NAMES,
    REPLY_TO_NAMES,
)
from schemas.records import Begin, End, Left, Tokens, UsageRecord
from schemas.request import PromptRequest
from schemas.topics import (
    CANCEL_TTL_MS,
    DEFAULT_LANE_PREFIX,
    DEFAULT_REPLY_PREFIX,
    LANES,
    MAX_PRIORITY,
    MAX_TENANT_CHARS,
    REPLY_TOPIC_CONFIG,
    USAGE_TOPIC,
    control_topic,
    dlq_topic,
)

Schema = dict[str, Any]

PROTOCOL_VERSION = "1.0.0"
_BINDING_VERSION = "0.5.0"
_PAYLOADS: dict[str, type] = {
    "PromptRequest": PromptRequest,
    "Begin": Begin,
    "Tokens": Tokens,
    "End": End,
    "Left": Left,
    "UsageRecord": UsageRecord,
}

_REPLIES = ("begin", "tokens", "end", "left")


def document() -> Schema:
    """The whole document, from the worker's side: it receives prompts and cancels, and sends the rest."""
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Carousel",
            "version": PROTOCOL_VERSION,
            "description": "Inference over Kafka: prompts on lanes, tokens on a reply topic per request. "
            "Readers ignore fields, headers and events that they do not know.",
        },
        "defaultContentType": ContentType.MSGPACK.value,
        "channels": _channels(),
        "operations": _operations(),
        "components": {"messages": _messages(), "schemas": _payload_schemas()},
    }


def _channels() -> Schema:
    replies = _REPLIES
    return {
        "lanes": _channel(
            f"{DEFAULT_LANE_PREFIX}{{lane}}",
            "A topic per tier. Key: the conversation or tenant, so that its turns meet the same worker.",
            ("prompt",),
            parameters={"lane": {"enum": list(LANES), "description": "the tier"}},
        ),
        "replies": _channel(
            None, "Where the request's `reply_to` says. Shared topics: tell requests apart by correlation_id.", replies
        ),
        "requestReplies": _channel(
            f"{DEFAULT_REPLY_PREFIX}{{correlation_id}}",
            "One topic per request. The caller creates it before it publishes, and deletes it after the end.",
            replies,
            parameters={"correlation_id": {"location": "$message.header#/correlation_id"}},
            kafka={
                "partitions": 1,
                "topicConfiguration": {name: int(value) for name, value in REPLY_TOPIC_CONFIG.items()},
            },
        ),
        "control": _channel(
            control_topic(),
            "Cancellation. Every worker reads all of it.",
            ("cancel",),
            kafka={"topicConfiguration": {"retention.ms": CANCEL_TTL_MS}},
        ),
        "deadLetters": _channel(dlq_topic(), "Records that no attempt can serve, as they were.", ("deadLetter",)),
        "usage": _channel(
            USAGE_TOPIC, "A record per finished request, at least once: deduplicate by `input`.", ("usage",)
        ),
    }


def _channel(
    address: str | None,
    description: str,
    messages: tuple[str, ...],
    parameters: Schema | None = None,
    kafka: Schema | None = None,
) -> Schema:
    channel: Schema = {
        "address": address,
        "description": description,
        "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in messages},
    }
    if parameters is not None:
        channel["parameters"] = parameters
    if kafka is not None:
        channel["bindings"] = {"kafka": {**kafka, "bindingVersion": _BINDING_VERSION}}
    return channel


def _operations() -> Schema:
    replies = [{"$ref": f"#/channels/replies/messages/{name}"} for name in _REPLIES]
    return {
        "complete": {
            "action": "receive",
            "channel": {"$ref": "#/channels/lanes"},
            "summary": "Run a prompt; the answer streams to the reply address.",
            "reply": {
                "address": {"location": "$message.header#/reply_to"},
                "channel": {"$ref": "#/channels/replies"},
                "messages": replies,
            },
        },
        "stream": _operation("send", "requestReplies", "Stream the answer to the request's own topic."),
        "cancel": _operation("receive", "control", "Stop a request, wherever it is."),
        "deadLetter": _operation("send", "deadLetters", "Set a record aside."),
        "account": _operation("send", "usage", "Say what a request cost."),
    }


def _operation(action: str, channel: str, summary: str) -> Schema:
    return {"action": action, "channel": {"$ref": f"#/channels/{channel}"}, "summary": summary}


def _messages() -> Schema:
    reply_key = "the correlation id"
    messages = {
        "prompt": _message(_request_headers(), _ref("PromptRequest"), key="any bytes"),
        "begin": _message(_reply_headers("begin", ["traceparent"]), _ref("Begin"), key=reply_key),
        "tokens": _message(_reply_headers("tokens", []), _ref("Tokens"), key=reply_key),
        "end": _message(_reply_headers("end", ["traceparent"]), _ref("End"), key=reply_key),
        "left": _message(_reply_headers("left", []), _ref("Left"), key=reply_key),
        "cancel": _message(_object({"content-type": _CONTENT_TYPE}, []), _CANCEL_PAYLOAD, key="any bytes"),
        "deadLetter": _message(_dead_letter_headers(), {"description": "the value as it was"}, key="the key as it was"),
        "usage": _message(_object({"content-type": _CONTENT_TYPE}, []), _ref("UsageRecord"), key="the tenant"),
    }
    for name in ("prompt", *_REPLIES):
        messages[name]["correlationId"] = {"location": "$message.header#/correlation_id"}
    return messages


def _message(headers: Schema, payload: Schema, key: str) -> Schema:
    return {
        "headers": headers,
        "payload": payload,
        "bindings": {"kafka": {"key": {"type": "string", "description": key}, "bindingVersion": _BINDING_VERSION}},
    }


_CONTENT_TYPE: Schema = {"type": "string", "enum": [each.value for each in ContentType]}
_CORRELATION_ID: Schema = {
    "type": "string",
    "description": "1 to 256 bytes; 1 to 200 of [A-Za-z0-9._-] for a reply topic of its own",
}
_CANCEL_PAYLOAD: Schema = {
    "type": "object",
    "properties": {"op": {"const": "cancel"}, "correlation_id": {"type": "string"}},
    "required": ["op", "correlation_id"],
}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(properties: Schema, required: list[str]) -> Schema:
    schema: Schema = {"type": "object", "properties": properties}
    return {**schema, "required": required} if required else schema


def _aliases(names: tuple[str, ...]) -> Schema:
    return {name: {"type": "string", "description": f"alias of {names[0]}"} for name in names[1:]}


def _request_headers() -> Schema:
    return _object(
        {
            "correlation_id": {**_CORRELATION_ID, "default": "<topic>-<partition>-<offset>"},
            **_aliases(CORRELATION_ID_NAMES),
            "reply_to": {"type": "string", "description": f"the reply topic; begins with {DEFAULT_REPLY_PREFIX}"},
            **_aliases(REPLY_TO_NAMES),
            "reply_partition": {"type": "string", "pattern": "^[0-9]+$"},
            **_aliases(REPLY_PARTITION_NAMES),
            "tenant": {"type": "string", "minLength": 1, "maxLength": MAX_TENANT_CHARS, "default": "default"},
            "priority": {
                "type": "string",
                "pattern": f"^[0-{MAX_PRIORITY}]$",
                "description": "larger is more urgent; lowered to the lane's cap",
            },
            "deadline_ms": {
                "type": "string",
                "pattern": "^[0-9]+$",
                "description": "Unix time in ms after which the answer is worthless",
            },
            "content-type": {**_CONTENT_TYPE, "default": ContentType.MSGPACK.value},
            "accept": {**_CONTENT_TYPE, "description": "of the reply records; default: the request's content-type"},
            "traceparent": {"type": "string", "description": "W3C trace context"},
            "tracestate": {"type": "string"},
            "baggage": {"type": "string"},
        },
        [],
    )


def _reply_headers(event: str, trace: list[str]) -> Schema:
    return _object(
        {
            "correlation_id": {**_CORRELATION_ID, "description": "as it came"},
            **_aliases(CORRELATION_ID_NAMES),
            "event": {"const": event},
            "content-type": _CONTENT_TYPE,
            **{name: {"type": "string"} for name in trace},
        },
        ["correlation_id", "event", "content-type", *trace],
    )


def _dead_letter_headers() -> Schema:
    text: Schema = {"type": "string"}
    return _object(
        {
            "dlq_reason": text,
            "dlq_message": text,
            "kafka_dlt-original-topic": text,
            "kafka_dlt-original-partition": {"type": "string", "description": "4-byte big-endian integer"},
            "kafka_dlt-original-offset": {"type": "string", "description": "8-byte big-endian integer"},
            "kafka_dlt-original-timestamp": {"type": "string", "description": "8-byte big-endian integer"},
            "kafka_dlt-exception-message": text,
            "traceparent": {**text, "description": "the record's own, or the worker's where it has none"},
            CUT_VALUE: {**text, "description": "bytes of the value, where it did not fit and its end is missing"},
            CUT_KEY: {**text, "description": "bytes of the key, where it did not fit and is missing"},
            CUT_HEADERS: {**text, "description": "bytes of the headers, where they did not fit and some are missing"},
        },
        ["dlq_reason", "dlq_message"],
    )


class _Draft7(GenerateJsonSchema):
    """Pydantic's generator, without the titles that only repeat the field names."""

    def field_title_should_be_set(self, _schema: Any) -> bool:
        return False


def _payload_schemas() -> Schema:
    _, generated = TypeAdapter.json_schemas(
        [(name, "validation", TypeAdapter(model)) for name, model in _PAYLOADS.items()],
        ref_template="#/components/schemas/{model}",
        schema_generator=_Draft7,
    )
    schemas: Schema = _as_draft_7(generated["$defs"])
    return schemas


def _as_draft_7(schema: Any) -> Any:
    """A tuple's item schemas are `prefixItems` since draft 2020-12, and `items` before."""
    if isinstance(schema, list):
        return [_as_draft_7(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {"items" if name == "prefixItems" else name: _as_draft_7(each) for name, each in schema.items()}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(document(), indent=2) + "\n")
