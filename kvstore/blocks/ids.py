"""Block ids, and how a chain of them grows with a token sequence.

Knows no tier, no tensor and no request.
"""

import hashlib
import hmac
import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

BlockId = bytes  # 32 bytes, names a block's content by its whole history

BLOCK_ID_BYTES = 32
QUANTISED = b"kv:int8:"  # how the id of a quantised copy ends
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


def is_quantised(block_id: BlockId) -> bool:
    return block_id.endswith(QUANTISED)


def quantised_id(block_id: BlockId) -> BlockId:
    """The id of this block's copy that went through int8, behind copies of all blocks before it: other content, under
    an id that says so. That of a copy is its own, as to quantise it again changes nothing.
    """
    if is_quantised(block_id):
        return block_id
    return hashlib.sha256(_field(b"q8", block_id)).digest()[: -len(QUANTISED)] + QUANTISED


def with_quantised(block_ids: Iterable[BlockId]) -> list[BlockId]:
    """These and their quantised copies."""
    return [found for one in block_ids for found in (one, quantised_id(one))]


class SpliceRun(NamedTuple):
    """Blocks [first, end) of a chain, which a splice made: they hold reused KV and exist only as it made them. parent:
    what the first is built on, instead of the block before it.
    """

    first: int
    parent: BlockId
    end: int


@dataclass(frozen=True, slots=True)
class Lineage:
    """What a chain is built on: its root, and where splices stand in it, in order. Blocks behind a splice are computed
    on top of it.

    sources: of a chain that begins with quantised copies, the blocks that these are copies of. Its first splices are
    those of the sources, the last of which then ends behind the copies; if they have none, it begins with the first.
    """

    root: BlockId
    splices: tuple[SpliceRun, ...] = ()
    sources: tuple[BlockId, ...] = ()

    @property
    def splice_index(self) -> int | None:
        """The first block that a splice made, None for a chain without one."""
        return self.splices[0].first if self.splices else None

    @property
    def splice_end(self) -> int:
        """Behind the last block that a splice made."""
        return self.splices[-1].end if self.splices else 0

    def parent(self, chain: Sequence[BlockId], index: int) -> BlockId:
        """Parent id of block `index`."""
        for run in self.splices:
            if index == run.first:
                return run.parent
        if index:
            return chain[index - 1]
        return quantised_id(self.root) if self.sources else self.root

    def with_copies(self, chain: Sequence[BlockId]) -> list[BlockId]:
        """The ids of a chain that is given with the sources of its copies."""
        num_copies = len(self.sources)
        return [*map(quantised_id, chain[:num_copies]), *chain[num_copies:]]

    def with_sources(self, chain: Sequence[BlockId]) -> list[BlockId]:
        """The ids of a chain, with the sources of its copies instead: other sessions have these, too."""
        return [*self.sources[: len(chain)], *chain[len(self.sources) :]]

    @property
    def first_reencoded(self) -> int | None:
        """The first block whose KV a splice has moved, or which builds on such a block."""
        moved = (run.first for run in self.splices if not self.sources or run.parent != quantised_id(self.root))
        return next(moved, None)

    def spliced(self, run: SpliceRun) -> "Lineage":
        """The same with one more splice."""
        return replace(self, splices=(*self.splices, run))

    @property
    def exact(self) -> "Lineage":
        """The same without splices and quantised copies."""
        return Lineage(self.root)


def chain_of(lineage: Lineage, token_ids: Sequence[int], block_size: int) -> list[BlockId]:
    """The ids of the full blocks of these tokens, at least those up to the last splice."""
    chain = lineage.with_copies(lineage.sources)
    for run in lineage.splices:
        if run.first < len(chain):
            continue
        extend_chain(chain, lineage.root, token_ids[: run.first * block_size], block_size)
        first = token_ids[run.first * block_size : (run.first + 1) * block_size]
        chain.append(child_block_id(run.parent, token_bytes(first)))
    extend_chain(chain, lineage.root, token_ids, block_size)
    return chain


def span_root(root: BlockId) -> BlockId:
    """The root of chains of spans, which stand alone, of the owner with this root. No computed chain has it."""
    return hmac.new(root, b"spans", hashlib.sha256).digest()


def splice_parent_id(secret: bytes, last_exact: BlockId, sources: Sequence[tuple[BlockId, int, int]]) -> BlockId:
    """The parent of a splice's first block: HMAC of where it begins and of every run of tokens that it reuses.

    sources: (source block id, offset, number of tokens) in order. No computed chain can have such a parent.
    """
    parts = [_field(b"le", last_exact)]
    for source, offset, length in sources:
        parts.append(_field(b"so", source + offset.to_bytes(4, "little") + length.to_bytes(4, "little")))
    return hmac.new(secret, _field(b"sp", b"".join(parts)), hashlib.sha256).digest()
