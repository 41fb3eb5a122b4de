"""What can go wrong for a caller. One base; `retriable` says whether the same call may succeed later."""


class ServiceError(Exception):
    """Base of everything that `service` raises, apart from RequestError (schemas.errors): a request that is wrong."""

    retriable = False


class BrokerUnavailable(ServiceError):
    """Kafka cannot be reached, or refuses the connection. The message names the address and the client's reason."""

    retriable = True


class BrokerFailed(ServiceError):
    """The embedded broker is not installed, cannot have its address, or did not start."""


class AddressTaken(BrokerFailed):
    """Another program has the address that the embedded broker is to have."""


class TopicsFailed(ServiceError):
    """Topics were not created or deleted: the broker refused. Names each topic and why."""


class NotAuthorized(ServiceError):
    """This user may not create reply topics, or not write to the lane. The message names what is not allowed."""


class LaneMissing(ServiceError):
    """The lane's topic does not exist, or the caller may not see it."""


class PublishFailed(ServiceError):
    """The request was not acknowledged. It may have reached Kafka: a cancel has been published for it."""

    retriable = True


class StreamBroken(ServiceError):
    """The reply cannot be read any further: its log breaks the contract or is gone, or the reader has died."""


class ReplyTopicDeleted(StreamBroken):
    """Somebody else has deleted the reply topic: the rest of the answer is lost. The request has been cancelled."""


class StreamClosed(ServiceError):
    """The stream was left, or its client closed, before the answer had ended."""


class RequestTimeout(ServiceError, TimeoutError):
    """No event for `timeout` seconds, or nothing by the deadline. The request has been cancelled."""

    retriable = True


class RequestFailed(ServiceError):
    """The service answered with an error (protocol.md 3): `code`, `message`, and when a retry makes sense."""

    def __init__(self, code: str, message: str, retry_after_ms: int | None = None) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.retry_after_ms = retry_after_ms
        self.retriable = code in {"overloaded", "quota_exceeded", "internal"}
