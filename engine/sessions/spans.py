"""Spans: texts that a client names, whose KV is computed once, alone, and reused wherever they stand in a prompt.

A span's own chain is its tokens behind the first one of the prompt, which takes the attention that any first token
takes. Its KV goes into the prompt's chain by a splice behind what is computed; what follows is computed on top of it.
Knows no session.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from kvstore.blocks.ids import BlockId, Lineage, extend_chain, span_root
from kvstore.engine.client.messages import Splice, Spliced
from kvstore.engine.client.requests import CoreClient, Handle
from kvstore.engine.outputs import Earlier
from kvstore.engine.sampling_params import SamplingParams

LEAST_BLOCKS = 8  # of a span to reuse: below that, a splice takes longer than it saves
Span = tuple[int, int]  # of ids
# Is told of each request that computes a span, or what stands before one.
Computing: TypeAlias = Callable[[Handle], object]


def unwatched(_: Handle) -> None:
    """Nobody wants to know."""


def with_spans(
    client: CoreClient, token_ids: Sequence[int], spans: Sequence[Span], tenant: str, before: Spliced,
    computing: Computing = unwatched,
) -> tuple[Spliced, list[BlockId]]:  # fmt: skip
    """The chain of a prompt's first blocks that reuses the KV of these spans, and the blocks of their own chains.

    before: what is known of its first blocks. Computes what is not stored, and waits for that: spans, and what stands
    before them. Where the KV of a span cannot be reused, that and what follows is to be computed: of one that begins
    the prompt, too, and in a prompt that no window holds. Where it fails, what it has spliced is deleted.
    """
    size, (known, lineage), own = client.facts.block_size, before, list[BlockId]()
    chain, spliced = list(known), before
    is_possible = client.facts.can_splice and len(token_ids) < client.facts.max_request_tokens
    root = span_root(lineage.root)
    try:
        for begin, end in spans if is_possible else ():
            source = [*token_ids[:1], *token_ids[begin:end]]
            moved = begin - 1  # by so much does a token of the source stand later in the prompt
            first = -(-begin // size)
            last = min(moved + len(source) // size * size, len(token_ids) - 1) // size
            if not begin or last - first < LEAST_BLOCKS or first < lineage.splice_end:
                continue
            extend_chain(chain, lineage.root, token_ids[: first * size], size)
            head = (chain[:first], lineage)
            source_chain = list[BlockId]()
            extend_chain(source_chain, root, source, size)
            span = (first * size - moved, last * size - moved)
            splice = Splice(source_chain, source, Lineage(root), [span], tenant, head)
            made = client.call(splice)
            for ids, spliced_ids in ((token_ids[: first * size], head), (source, ([], Lineage(root)))):
                if made is None:  # one of them is not stored, the head more often
                    compute(client, ids, tenant, spliced_ids, source_chain[-1], computing)
                    made = client.call(splice)
            own += source_chain
            if made is None:
                break
            chain, lineage = list(made[0]), made[1]
            spliced = (chain, lineage)
    except Exception:
        made_here = spliced[1].splices[len(before[1].splices) :]
        client.forget(spliced[0][made_here[0].first :] if made_here else ())
        raise
    return spliced, own


def compute(
    client: CoreClient, token_ids: Sequence[int], tenant: str, spliced: Spliced, together: bytes = b"",
    computing: Computing = unwatched,
) -> None:  # fmt: skip
    """Compute the KV of these ids, and wait for that. spliced: the chain of their first blocks. together: of several
    engines, new chains with the same go to one.
    """
    if token_ids:
        # Under the ids that are spliced then, and not behind quantised copies.
        params = SamplingParams(max_tokens=1, kv_exact=not spliced[1].splices)
        earlier = Earlier(conversation=together)
        handle = client.submit(list(token_ids), params, tenant, spliced=spliced, earlier=earlier)
        computing(handle)
        for _ in client.stream(handle):
            pass
