"""Carousel for callers: `from carousel import Client`. Works without torch."""

from schemas.codec import ContentType
from schemas.connection import KafkaConnection
from schemas.errors import RequestError
from schemas.reasons import ErrorCode, FinishReason
from schemas.records import Begin, ChoiceResult, End, ReplyRecord, Timing, TokenLogprob, Tokens, Usage
from service.broker import EmbeddedBroker
from service.client import Client
from service.errors import (
    BrokerFailed,
    BrokerUnavailable,
    LaneMissing,
    NotAuthorized,
    PublishFailed,
    ReplyTopicDeleted,
    RequestFailed,
    RequestTimeout,
    ServiceError,
    StreamBroken,
    StreamClosed,
    TopicsFailed,
)
from service.stream import Completion, ReplyStream
from service.topics import create_topics

__all__ = [
    "Begin",
    "BrokerFailed",
    "BrokerUnavailable",
    "ChoiceResult",
    "Client",
    "Completion",
    "ContentType",
    "EmbeddedBroker",
    "End",
    "ErrorCode",
    "FinishReason",
    "KafkaConnection",
    "LaneMissing",
    "NotAuthorized",
    "PublishFailed",
    "ReplyRecord",
    "ReplyStream",
    "ReplyTopicDeleted",
    "RequestError",
    "RequestFailed",
    "RequestTimeout",
    "ServiceError",
    "StreamBroken",
    "StreamClosed",
    "Timing",
    "TokenLogprob",
    "Tokens",
    "TopicsFailed",
    "Usage",
    "create_topics",
]
