"""Block ids, and how a chain of them grows with a token sequence.

Knows no tier, no tensor and no request.
"""

import hashlib
import hmac
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

BlockId = bytes  # 32 bytes, names a block's content by its whole history

BLOCK_ID_BYTES = 32
TOKEN_BYTES = 4  # of a token id in a block's record
NO_TOKENS = b"\xff" * TOKEN_BYTES  # a token that no vocabulary has
_TOKEN_TYPE = "I" if array("I").itemsize == 4 else "L"


def _field(tag: bytes, value: bytes) -> bytes:
    """One tagged, length-prefixed field, so that no two different field lists give the same bytes."""
    return tag + len(value).to_bytes(8, "little") + value


def lineage_root(secret: bytes, fingerprint: str, tenant: str = "", cache_salt: str = "") -> BlockId:
    """The parent of a chain's first block: HMAC-SHA256 of model and owner under the store's secret.

    Another fingerprint, tenant or salt gives another root, so their chains never meet.
    """
    fields = ((b"fp", fingerprint), (b"tn", tenant), (b"cs", cache_salt))
    # A client's JSON may hold half a surrogate pair, which plain UTF-8 refuses; it is a salt like any other.
    message = b"".join(_field(tag, text.encode("utf-8", "surrogatepass")) for tag, text in fields)
    return hmac.new(secret, message, hashlib.sha256).digest()


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian u32."""
    tokens = array(_TOKEN_TYPE, token_ids)
    if tokens.itemsize != 4 or array("H", [1]).tobytes() != b"\x01\x00":
        return b"".join(int(t).to_bytes(4, "little") for t in token_ids)
    return tokens.tobytes()


def ids_of(tokens: bytes) -> list[int]:
    """The token ids of these bytes."""
    return list(struct.unpack(f"<{len(tokens) // TOKEN_BYTES}I", tokens))


def child_block_id(parent_id: BlockId, tokens: bytes) -> BlockId:
    """Id of the block that holds `tokens` (see `token_bytes`) after the block `parent_id`."""
    return hashlib.sha256(_field(b"pa", parent_id) + _field(b"tk", tokens)).digest()


def extend_chain(chain: list[BlockId], root: BlockId, token_ids: Sequence[int], block_size: int) -> None:
    """Append the ids of the full blocks of `token_ids` that `chain` does not name yet. Ids already there are kept."""
    first, last = len(chain), len(token_ids) // block_size
    if first >= last:
        return
    tokens = token_bytes(token_ids[first * block_size : last * block_size])
    parent = chain[-1] if chain else root
    step = 4 * block_size
    for start in range(0, len(tokens), step):
        parent = child_block_id(parent, tokens[start : start + step])
        chain.append(parent)


def state_chain(block_id: BlockId, num_blocks: int, block_size: int) -> list[BlockId]:
    """Ids of the blocks that hold the state behind this block: built on it, of tokens that no vocabulary has."""
    chain, tokens = [block_id], NO_TOKENS * block_size
    for _ in range(num_blocks):
        chain.append(child_block_id(chain[-1], tokens))
    return chain[1:]


@dataclass(frozen=True, slots=True)
class Lineage:
    """What a chain is built on: its root, and where a splice stands in it.

    splice_index: the first block that a splice made, None for a chain without one. It is built on `splice_parent`
    instead of the block before it. Blocks [splice_index, splice_end) hold reused KV and exist only as the splice made
    them; those after are computed on top of it.
    """

    root: BlockId
    splice_index: int | None = None
    splice_parent: BlockId = b""
    splice_end: int = 0

    def parent(self, chain: Sequence[BlockId], index: int) -> BlockId:
        """Parent id of block `index`."""
        if index == self.splice_index:
            return self.splice_parent
        return chain[index - 1] if index else self.root

    @property
    def exact(self) -> "Lineage":
        """The same without the splice."""
        return Lineage(self.root)


def splice_parent_id(secret: bytes, last_exact: BlockId, sources: Sequence[tuple[BlockId, int, int]]) -> BlockId:
    """The parent of a splice's first block: HMAC of where it begins and of every run of tokens that it reuses.

    sources: (source block id, offset, number of tokens) in order. No computed chain can have such a parent.
    """
    parts = [_field(b"le", last_exact)]
    for source, offset, length in sources:
        parts.append(_field(b"so", source + offset.to_bytes(4, "little") + length.to_bytes(4, "little")))
    return hmac.new(secret, _field(b"sp", b"".join(parts)), hashlib.sha256).digest()
