"""A small table of tokens, grammars compiled over it, and what masks say."""

from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvstore import SamplingParams, StructuredOutputsParams
from kvstore.blocks.ids import Lineage
from kvstore.engine.core.request import Request
from kvstore.engine.text.compiler import GrammarCompiler
from tests.support.waiting import TIMEOUT_S

EOS = "<|eos|>"
WORDS = ["ab", "abc", "ba", "bb", "aab", '"a', '":', "{}", '{"', "12", "bab", "ca"]


def tokenizer_of(words: list[str] = WORDS):
    """Every byte, these words, and a special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*alphabet, *words])}
    merges = [(word[:-1], word[-1]) for word in words if word[:-1] in vocab]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(EOS, special=True)])
    added = backend.get_added_tokens_decoder()
    return SimpleNamespace(backend_tokenizer=backend, added_tokens_decoder=added, eos=backend.token_to_id(EOS))


def request_of(wanted: StructuredOutputsParams, n: int = 1) -> Request:
    params = SamplingParams(structured_outputs=wanted, n=n)
    first = Request("first", [1], params, 8, Lineage(b"r" * 32), 4, seed=0)
    first.children = [first.sibling(index) for index in range(1, n)]
    return first


def compiled(compiler: GrammarCompiler, wanted: StructuredOutputsParams, n: int = 1) -> Request:
    """A prompt whose choices have their matchers. Raises why they have none."""
    first, done = request_of(wanted, n), Future[Exception | None]()
    compiler.prepare(first, lambda _, fault: done.set_result(fault))
    if (fault := done.result(TIMEOUT_S)) is not None:
        raise fault
    return first


def matcher_of(table: LLTokenizer, grammar: str) -> LLMatcher:
    matcher = LLMatcher(table, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def allowed(mask: np.ndarray) -> set[int]:
    """The token ids of a mask [W] int32."""
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())
