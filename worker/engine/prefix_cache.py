"""Which block holds which prefix: a chain of digests, so that equal digests mean equal tokens from the start on.

The digest of a full block covers its tokens and the digest before it, and the first one the salt, so that tenants who
must not see each other's timing do not share. BLAKE2b of 128 bits: a collision is out of reach, also on purpose.
"""

from array import array
from collections.abc import Sequence as Items
from hashlib import blake2b

_DIGEST_BYTES = 16


def root_digest(salt: str) -> bytes:
    """What the first block of a sequence has in place of a parent."""
    return blake2b(salt.encode(), digest_size=_DIGEST_BYTES).digest()


def block_digest(parent: bytes, token_ids: Items[int]) -> bytes:
    """The digest of a full block that follows parent."""
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=_DIGEST_BYTES).digest()


class PrefixCache:
    """Digest to block and back. One block per digest: the first that was computed."""

    __slots__ = ("_block_of", "_digest_of")

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    def __contains__(self, block_id: int) -> bool:
        """Whether the block can be found by a digest."""
        return block_id in self._digest_of

    def find(self, digest: bytes) -> int | None:
        return self._block_of.get(digest)

    def insert(self, digest: bytes, block_id: int) -> None:
        """Makes a block findable, unless another one holds the same already. Asserts that it had no digest yet."""
        assert block_id not in self._digest_of, f"block {block_id} has a digest already"
        if self._block_of.setdefault(digest, block_id) == block_id:
            self._digest_of[block_id] = digest

    def forget(self, block_id: int) -> None:
        """The block is about to be reused. Asserts that it was findable."""
        del self._block_of[self._digest_of.pop(block_id)]

    def check_integrity(self) -> None:
        """Asserts invariant P4 (README.md): both maps say the same."""
        assert len(self._block_of) == len(self._digest_of), "P4: a digest has two blocks, or a block two digests"
        for digest, block_id in self._block_of.items():
            assert self._digest_of[block_id] == digest, f"P4: block {block_id} is found by a digest that is not its own"
