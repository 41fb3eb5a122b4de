"""Why a request ended, and what was wrong with it: the words of the wire. The engine uses them, so no library here."""

from enum import StrEnum


class FinishReason(StrEnum):
    """Why a choice ended (protocol.md 3, `end.finish_reason`)."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


class ErrorCode(StrEnum):
    """What an `end` with finish_reason `error` says in `error.code` (protocol.md 3)."""

    INVALID_REQUEST = "invalid_request"
    MODEL_NOT_FOUND = "model_not_found"
    PROMPT_TOO_LONG = "prompt_too_long"
    EXCEEDS_KV_CAPACITY = "exceeds_kv_capacity"
    QUOTA_EXCEEDED = "quota_exceeded"
    OVERLOADED = "overloaded"
    DEADLINE_UNREACHABLE = "deadline_unreachable"
    INTERNAL = "internal"


class DeadLetterReason(StrEnum):
    """Why a record is on the DLQ (protocol.md 7, `dlq_reason`)."""

    CORRELATION_ID_INVALID = "correlation_id_invalid"
    REPLY_TO_MISSING = "reply_to_missing"
    REPLY_TO_INVALID = "reply_to_invalid"
    REPLY_TO_FORBIDDEN = "reply_to_forbidden"
    REPLY_PARTITION_INVALID = "reply_partition_invalid"
    NO_REPLY_TOPIC = "no_reply_topic"
    REPLY_UNAUTHORISED = "reply_unauthorised"
    REPLY_TOO_LARGE = "reply_too_large"  # its reply topic takes not even the smallest answer
    INVALID_REQUEST = "invalid_request"  # its value cannot be decoded
    FRUITLESS_ATTEMPTS = "fruitless_attempts"  # too many in a row ended without a token
    INTERNAL = "internal"
