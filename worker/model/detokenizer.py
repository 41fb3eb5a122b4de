"""Tokens to text, one at a time.

The sum of what `feed` and `flush` return equals decoding all tokens at once (special tokens skipped), also for bytes
that are not UTF-8, and no return value ends in half a character. What `feed` returns depends on the tokens fed so far,
and a token costs the same at any position.
"""

import codecs
from collections.abc import Callable, Mapping, Sequence

# A window of this many tokens stands in for all the text before, where the text of a token depends on what precedes it.
_WINDOW_TOKENS = 4
# Undecodable text is held back for so many tokens, then it is given out as it is. (A character has at most 4 bytes.)
_MAX_HELD_TOKENS = 4
_REPLACEMENT = "\ufffd"


class ByteDetokenizer:
    """For byte-level vocabularies: a token is a string of bytes, and the text is their UTF-8 decoding."""

    def __init__(self, token_bytes: Sequence[bytes]):
        """`token_bytes`: by token id; empty for special tokens."""
        self._token_bytes = token_bytes
        # Replaces each maximal invalid subsequence with U+FFFD, as the tokenizers library does.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        """The text that became complete with this token. An id without a token has none."""
        if token_id >= len(self._token_bytes):
            return ""
        return self._decoder.decode(self._token_bytes[token_id])

    def flush(self) -> str:
        """What is left at the end: an incomplete character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For any other vocabulary: the text of a token is what it adds to the decoding of the few tokens before it.

    With byte fallback (sentencepiece), a run of byte tokens is one unit: whether its bytes are text or each becomes
    U+FFFD is known at its end only, so it is held back until then.
    """

    def __init__(self, decode: Callable[[list[int]], str], is_byte: Mapping[int, bool]):
        """`decode`: ids to text. `is_byte`: by token id, for the ids that have text; others are skipped."""
        self._decode = decode
        self._is_byte = is_byte
        self._window: list[int] = []
        self._window_text = ""
        self._held: list[int] = []
        self._holds_bytes = False

    def feed(self, token_id: int) -> str:
        """The text that became complete with this token. An id without a token has none."""
        is_byte = self._is_byte.get(token_id)
        if is_byte is None:
            return ""
        text = self._release() if self._holds_bytes and not is_byte else ""
        self._holds_bytes = is_byte
        self._held.append(token_id)
        if is_byte:
            return ""
        added = self._added_text()
        if added.endswith(_REPLACEMENT) and len(self._held) < _MAX_HELD_TOKENS:
            return text
        return text + self._release(added)

    def flush(self) -> str:
        """What is left at the end: an incomplete character becomes U+FFFD."""
        return self._release()

    def _added_text(self) -> str:
        return self._decode(self._window + self._held)[len(self._window_text) :]

    def _release(self, text: str | None = None) -> str:
        """The text of the held tokens (`text`, if the caller knows it), which become the window."""
        if not self._held:
            return ""
        if text is None:
            text = self._added_text()
        # This may cut a run of bytes, which then decodes to something else: the same in this window and the next.
        self._window = (self._window + self._held)[-_WINDOW_TOKENS:]
        self._window_text = self._decode(self._window)
        self._held = []
        return text
