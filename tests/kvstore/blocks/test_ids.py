"""Block ids: their bytes as the design says, what separates chains, and that a chain only ever grows."""

import hashlib
import hmac
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.blocks import ids as block
from kvstore.blocks.ids import (
    BLOCK_ID_BYTES,
    Lineage,
    SpliceRun,
    child_block_id,
    extend_chain,
    lineage_root,
    span_root,
    token_bytes,
)

SECRET = bytes(range(32))
ROOT = lineage_root(SECRET, "model-a", "tenant", "salt")
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def field(tag: bytes, value: bytes) -> bytes:
    return tag + struct.pack("<Q", len(value)) + value


def chain_of(tokens: list[int], block_size: int = 4, root: bytes = ROOT) -> list[bytes]:
    chain: list[bytes] = []
    extend_chain(chain, root, tokens, block_size)
    return chain


def test_a_root_is_the_hmac_of_fingerprint_tenant_and_salt():
    message = field(b"fp", b"model-a") + field(b"tn", b"tenant") + field(b"cs", b"salt")
    assert hmac.new(SECRET, message, hashlib.sha256).digest() == ROOT


def test_a_block_id_is_the_sha256_of_parent_and_tokens():
    """Ids are stored on disk: changing them makes every store forget everything, so it must not happen by accident."""
    tokens = [0, 1, 70_000, 2**32 - 1]
    expected = hashlib.sha256(field(b"pa", ROOT) + field(b"tk", struct.pack("<4I", *tokens))).digest()
    assert child_block_id(ROOT, token_bytes(tokens)) == expected
    assert len(expected) == BLOCK_ID_BYTES


@given(TOKENS)
def test_token_bytes_are_little_endian_u32(tokens):
    assert token_bytes(tokens) == struct.pack(f"<{len(tokens)}I", *tokens)


@pytest.mark.parametrize("tokens", [[], [1], [2**32 - 1, 0, 256]])
def test_a_machine_without_a_u32_array_gets_the_same_bytes(tokens, monkeypatch):
    expected = token_bytes(tokens)
    monkeypatch.setattr(block, "_TOKEN_TYPE", "Q")
    assert token_bytes(tokens) == expected


@pytest.mark.parametrize("tokens", [[-1], [2**32]])
def test_a_token_that_is_no_u32_is_not_cut_to_one(tokens):
    with pytest.raises(OverflowError):
        token_bytes(tokens)


@given(TOKENS, st.integers(1, 9))
def test_a_chain_names_every_full_block_and_no_other(tokens, block_size):
    chain = chain_of(tokens, block_size)
    assert len(chain) == len(tokens) // block_size
    parent = ROOT
    for i, block_id in enumerate(chain):
        parent = child_block_id(parent, token_bytes(tokens[i * block_size : (i + 1) * block_size]))
        assert block_id == parent


@given(TOKENS, st.integers(1, 5), st.lists(st.integers(0, 40), max_size=6))
def test_growing_a_chain_in_any_steps_gives_the_same_chain(tokens, block_size, stops):
    chain: list[bytes] = []
    for stop in [*sorted(stops), len(tokens)]:
        extend_chain(chain, ROOT, tokens[:stop], block_size)
    assert chain == chain_of(tokens, block_size)


def test_a_chain_that_is_longer_than_the_tokens_stays():
    chain = chain_of(list(range(16)))
    extend_chain(chain, ROOT, [7], 4)
    assert chain == chain_of(list(range(16)))


def test_one_token_changes_its_block_and_all_after_it_and_none_before():
    tokens = list(range(32))
    changed = [*tokens[:13], 99, *tokens[14:]]
    same = [a == b for a, b in zip(chain_of(tokens), chain_of(changed), strict=True)]
    assert same == [True] * 3 + [False] * 5


@pytest.mark.parametrize(
    "other",
    [
        (SECRET, "model-b", "tenant", "salt"),
        (SECRET, "model-a", "tenant2", "salt"),
        (SECRET, "model-a", "tenant", "salt2"),
        (SECRET, "model-a", "t" + field(b"cs", b"x").decode("latin-1"), ""),
        (SECRET, "model-a", "tenants", "alt"),  # the same bytes when simply joined
        (SECRET, "model-atenant", "", "salt"),
        (SECRET, "model-a", "salt", "tenant"),
        (SECRET, "model-a", "", "tenantsalt"),
        (bytes(32), "model-a", "tenant", "salt"),
    ],
)
def test_another_model_tenant_salt_or_store_shares_no_id(other):
    tokens = list(range(40))
    mine, theirs = chain_of(tokens), chain_of(tokens, root=lineage_root(*other))
    assert set(mine).isdisjoint(theirs)


def test_half_a_surrogate_pair_is_a_salt_like_any_other():
    salts = ["\ud800", "\ud801", "\udc00", "\ud83d\ude00", "😀", "?", ""]  # what JSON can bring
    assert len({lineage_root(SECRET, "m", "t", salt) for salt in salts}) == len(salts)


@given(st.text(max_size=20), st.text(max_size=20), st.text(max_size=20), st.text(max_size=20))
def test_two_owners_have_one_root_only_when_they_are_one(tenant_a, salt_a, tenant_b, salt_b):
    roots_equal = lineage_root(SECRET, "m", tenant_a, salt_a) == lineage_root(SECRET, "m", tenant_b, salt_b)
    assert roots_equal == ((tenant_a, salt_a) == (tenant_b, salt_b))


def test_each_splice_of_a_chain_has_a_parent_of_its_own():
    tokens, runs = list(range(45)), (SpliceRun(1, b"p" * 32, 3), SpliceRun(3, b"q" * 32, 4), SpliceRun(7, b"r" * 32, 9))
    lineage = Lineage(b"l" * 32)
    for run in runs:
        lineage = lineage.spliced(run)
    assert lineage.splices == runs and (lineage.splice_index, lineage.splice_end) == (1, 9)
    chain = block.chain_of(lineage, tokens, 4)
    plain = block.chain_of(lineage.exact, tokens, 4)
    assert (
        len(chain) == len(plain) == 11 and [a == b for a, b in zip(chain, plain, strict=True)] == [True] + [False] * 10
    )
    parents = [lineage.parent(chain, index) for index in range(11)]
    expected = [lineage.root, *chain[:10]]
    for run in runs:
        expected[run.first] = run.parent
    assert parents == expected
    parts = [token_bytes(tokens[4 * index : 4 * index + 4]) for index in range(11)]
    assert chain == [child_block_id(parent, part) for parent, part in zip(parents, parts, strict=True)]


def test_spans_have_a_root_of_each_owner():
    roots = [lineage_root(b"s", "model", tenant, salt) for tenant in ("a", "b") for salt in ("", "x")]
    spans = [span_root(root) for root in roots]
    assert len({*roots, *spans}) == 8 and spans == [span_root(root) for root in roots]
