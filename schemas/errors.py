"""What can be wrong with a record, by who has to hear of it. Standard library only."""

from schemas.reasons import DeadLetterReason, ErrorCode


class RequestError(Exception):
    """The caller's mistake, or a refusal: answered with an `end` that carries code and message (protocol.md 3)."""

    def __init__(self, code: ErrorCode, message: str, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after_ms = retry_after_ms


class DecodeError(RequestError):
    """The value is no map in its content type, or above a limit. Besides the answer, the record is dead-lettered."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.INVALID_REQUEST, message)


class Unanswerable(Exception):
    """The request names no usable reply log, so only the dead-letter queue hears of it.

    message: a sentence.
    """

    def __init__(self, reason: DeadLetterReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


def reason_of(error: OSError) -> str:
    """What the system says, in words and without its number, for a sentence."""
    words = error.strerror or str(error)
    return words.partition(" (while")[0].lower()  # asyncio and socket add what they tried


class ProtocolError(Exception):
    """A reply log breaks the contract. Readers raise it and never guess."""
