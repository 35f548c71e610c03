"""Which quantised copies a chain begins with: a chain is what its ids say, whatever is held where.

A model of lives: what was computed, behind what, and which of it is held.
"""

from itertools import pairwise

import pytest

from kvstore.blocks.ids import Lineage, SpliceRun, extend_chain, quantised_id, token_bytes
from kvstore.store.quantised import with_copies
from kvstore.store.stored import ChainContent

SIZE, ROOT = 2, b"r" * 32
TOKENS = list(range(40))
PLAIN = Lineage(ROOT)


def chain_of(num_blocks: int, begin: tuple[bytes, ...] = (), root: bytes = ROOT) -> list[bytes]:
    chain = list(begin)
    extend_chain(chain, root, TOKENS[: num_blocks * SIZE], SIZE)
    return chain


def found(chain: list[bytes], held, lineage: Lineage = PLAIN, most: int | None = None) -> Lineage | None:
    content = ChainContent(chain, token_bytes(TOKENS), lineage, "")
    return with_copies(content, len(chain) if most is None else most, SIZE, set(held).__contains__)


def copies(chain) -> list[bytes]:
    return [quantised_id(block_id) for block_id in chain]


EXACT = chain_of(20)


def begun(num_copies: int, sources=EXACT) -> Lineage:
    return Lineage(ROOT, (SpliceRun(0, quantised_id(ROOT), num_copies),), tuple(sources[:num_copies]))


@pytest.mark.parametrize(
    ("held", "num_copies"),
    [
        ([], None), (EXACT[:7], None), (copies(EXACT[:5]), 5), (copies(EXACT[:3]) + copies(EXACT[4:9]), 3),
        (EXACT[:4] + copies(EXACT[:4]), None), (EXACT[:4] + copies(EXACT[:6]), 6), (EXACT + copies(EXACT), None),
        (copies(EXACT[1:9]), None),
    ],
)  # fmt: skip
def test_copies_are_taken_where_they_are_more_than_exact_blocks(held, num_copies):
    assert found(EXACT, held) == (None if num_copies is None else begun(num_copies))


def test_no_more_are_taken_than_may_be_loaded():
    assert found(EXACT, copies(EXACT), most=4) == begun(4)
    assert found(EXACT, copies(EXACT), most=0) is None and found([], copies(EXACT)) is None


def test_what_was_computed_behind_copies_is_found_exact_or_as_copies_of_its_own():
    """Lives: exact; then behind copies; then behind copies of that."""
    first = copies(EXACT[:5])
    second = chain_of(9, tuple(first))[5:]
    assert found(EXACT, first + second) == begun(5), "computed in this life: no copies of it"
    later = found(EXACT, first + copies(second))
    assert later == begun(9, [*EXACT[:5], *second])
    known = later.with_copies(later.sources)
    assert known == first + copies(second)
    third = chain_of(12, tuple(known))[9:]
    assert found(EXACT, known + third) == later
    assert found(EXACT, known + copies(third)) == begun(12, [*EXACT[:5], *second, *third])
    # What is held further counts, although less of it is exact.
    assert found(EXACT, first + second[:2] + copies(second)) == later


def test_a_session_that_knows_its_chain_finds_the_same():
    first = copies(EXACT[:5])
    chain = chain_of(9, tuple(first))
    assert found(chain, chain, begun(5)) is None, "all of it is there"
    assert found(chain, copies(chain), begun(5)) == begun(9, [*EXACT[:5], *chain[5:]])
    assert found(chain, first + chain[5:7], begun(5)) is None, "nothing better"
    assert begun(5).with_copies([*EXACT[:5], *chain[5:]]) == chain


def test_a_splice_keeps_its_parent_as_a_copy():
    spliced = Lineage(ROOT, (SpliceRun(2, b"s" * 32, 5),))
    chain = EXACT[:2]
    extend_chain(chain, ROOT, TOKENS[:4], SIZE)
    chain += [bytes([i]) * 32 for i in range(3)]
    extend_chain(chain, ROOT, TOKENS[:16], SIZE)
    lineage = found(chain, copies(chain), spliced)
    assert lineage == Lineage(ROOT, (SpliceRun(2, quantised_id(b"s" * 32), 8),), tuple(chain))
    made = lineage.with_copies(chain)
    assert [lineage.parent(made, index) for index in range(4)] == [
        quantised_id(ROOT), made[0], quantised_id(b"s" * 32), made[2],
    ]  # fmt: skip
    assert lineage.first_reencoded == 2 and begun(3).first_reencoded is None
    assert found(chain, copies(chain[:2]), spliced) == begun(2), "the splice itself is missing"
    assert lineage.exact == Lineage(ROOT)


def test_a_splice_that_was_computed_instead_behind_copies_is_none():
    """Its head alone was left, as copies: the same tokens were computed behind these, and have copies by now."""
    spliced = Lineage(ROOT, (SpliceRun(2, b"s" * 32, 5),))
    chain = EXACT[:2] + [bytes([i]) * 32 for i in range(3)]
    computed = chain_of(8, tuple(copies(EXACT[:2])))[2:]
    lineage = found(chain, copies(EXACT[:2] + computed), spliced)
    assert lineage == begun(5, [*EXACT[:2], *computed])
    # It parts behind the splice's first block.
    computed = chain_of(8, tuple(copies(chain[:3])))[3:]
    lineage = found(chain, copies(chain[:3] + computed), spliced)
    assert lineage == Lineage(ROOT, (SpliceRun(2, quantised_id(b"s" * 32), 5),), (*chain[:3], *computed[:2]))


def test_a_copy_says_that_it_is_one_and_has_no_copy():
    ids = EXACT + copies(EXACT)
    assert len(set(ids)) == len(ids) and all(len(one) == 32 for one in ids)
    assert copies(copies(EXACT)) == copies(EXACT)
    assert all(begun(9).parent(copies(EXACT), i) == quantised_id(a) for i, (a, _) in enumerate(pairwise(EXACT), 1))
