"""Names for the content of blocks: a digest over all tokens up to the block's end, and over what else shapes them."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence


class PrefixHasher:
    """Chains 256-bit BLAKE2 digests over full blocks of tokens.

    Keys and values at a position depend on every token before it, so a block's name covers its parent's. The digest is
    long enough that two different contexts never share a name, also where clients choose the tokens to that end. Names
    are the same in every process with the same `namespace`.
    """

    __slots__ = ("_namespace", "_pack", "block_size")

    def __init__(self, block_size: int, namespace: str = "") -> None:
        """`namespace` separates models or adapters that share an index."""
        self.block_size = block_size
        self._namespace = namespace.encode()
        self._pack = struct.Struct(f"<{block_size}I").pack

    def root(self, salt: str | None) -> bytes:
        """Parent of a sequence's first block. Requests with different salts never share blocks."""
        digest = hashlib.blake2b(digest_size=32, person=b"dpi-prefix-root")
        digest.update(struct.pack("<Q", len(self._namespace)) + self._namespace)
        digest.update(b"\x00" if salt is None else b"\x01" + salt.encode("utf-8", "surrogatepass"))
        return digest.digest()

    def extend(self, hashes: list[bytes], root: bytes, tokens: Sequence[int], num_tokens: int) -> None:
        """Append to `hashes` the names of all full blocks within the first `num_tokens` tokens not named yet."""
        size = self.block_size
        pack = self._pack
        done = len(hashes)
        parent = hashes[-1] if hashes else root
        for start in range(done * size, (num_tokens // size) * size, size):
            parent = hashlib.blake2b(parent + pack(*tokens[start : start + size]), digest_size=32).digest()
            hashes.append(parent)
