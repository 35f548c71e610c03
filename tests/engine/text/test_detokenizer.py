"""Pieces add up to the tokenizer's own decode, in whole characters, cut at the stop string that ends first."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from kvstore.engine.outputs import CachedTokensDetails, Choice, RequestOutput, ToolCall, ToolCallEvent, Usage
from kvstore.engine.sampling_params import SamplingParams
from kvstore.engine.text.answer_parser import AnswerParser
from kvstore.engine.text.language import (
    MAX_UNFINISHED,
    MAX_WINDOW_TOKENS,
    REPLACEMENT,
    ChoiceText,
    answer_ids,
    token_bytes,
)
from kvstore.engine.text.response_template import ResponseTemplate

SENTENCES = [
    "Hello, how are you today? I am fine, thank you.",
    "Emoji: 🙂🎉👩‍👩‍👧 flags 🇫🇷 and skin 👍🏽 tones.",
    "世界你好 — naïve café, straße",
    "def f(x):\n    return x + 1\n\nEND",
]
TEXTS = st.text(st.sampled_from("abcdef Hello,.\n世界é🙂🎉👩‍👧👍🏽\ufffd"), max_size=20)


def byte_level():
    """Byte-level BPE as GPT-2, Llama 3 and Qwen use it; characters beyond ASCII take several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<eos>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def byte_fallback():
    """Metaspace BPE with byte fallback and Llama 2's decoder: only a few letters are tokens, all else is bytes."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    for piece in ["▁", *"abcdeflo世", "▁a", "▁b", "lo", "▁▁", "▁lo", "ab"]:
        vocab[piece] = len(vocab)
    merges = [("▁", "a"), ("▁", "b"), ("l", "o"), ("▁", "▁"), ("▁", "lo"), ("a", "b")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(" ", 1, 0)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


BYTE_LEVEL, BYTE_FALLBACK = byte_level(), byte_fallback()
BOTH = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte_level", "byte_fallback"])


def byte_ids(tokenizer, data):
    """Ids of single bytes, in the vocabulary of either tokenizer."""
    if tokenizer is BYTE_FALLBACK:
        return [3 + byte for byte in data]
    # GPT-2's table: printable bytes stand for themselves, the others are moved behind 256, in order.
    kept = {*range(33, 127), *range(161, 173), *range(174, 256)}
    moved = [byte for byte in range(256) if byte not in kept]
    return [tokenizer.token_to_id(chr(byte if byte in kept else 256 + moved.index(byte))) for byte in data]


def choice_text(tokenizer, stop=(), prompt_token_ids=(), parser=None):
    output = RequestOutput("", list(prompt_token_ids), [Choice()], Usage(0, 0, CachedTokensDetails()), None)
    return ChoiceText(output, 0, SamplingParams(stop=stop), tokenizer, parser)


def append(text, token_ids):
    """What these tokens release, up to a stop string."""
    return "".join(text.add_token(token_id, None, None).text for token_id in token_ids if text.stop_string is None)


def finish(text):
    return "" if text.stop_string is not None else text.end("stop").text


def pieces_of(text, token_ids):
    return [append(text, [token_id]) for token_id in token_ids] + [finish(text)]


def cut_at_stop(text, stop):
    """Reference: read character by character, cut when one is complete, the longest of those."""
    for end in range(1, len(text) + 1):
        met = [s for s in stop if text[:end].endswith(s)]
        if met:
            longest = max(met, key=len)
            return text[: end - len(longest)], longest
    return text, None


# --- pieces add up ---


@BOTH
def test_the_bytes_of_tokens_add_up_although_each_is_part_of_a_character(tokenizer):
    text = "世é🙂\ufffd"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    texts = [tokenizer.decode([token_id], skip_special_tokens=False) for token_id in ids]
    parts = [token_bytes(tokenizer, token_id, one) for token_id, one in zip(ids, texts, strict=True)]
    assert b"".join(parts).decode() == text


@BOTH
@settings(max_examples=300, deadline=None, derandomize=True)
@given(text=TEXTS)
def test_pieces_of_real_text_add_up_and_hold_whole_characters(tokenizer, text):
    ids = tokenizer.encode(text).ids
    detokenizer = choice_text(tokenizer)
    pieces = pieces_of(detokenizer, ids)
    assert "".join(pieces) == detokenizer.choice.text == tokenizer.decode(ids)
    assert detokenizer.choice.text.count(REPLACEMENT) == text.count(REPLACEMENT)
    assert len(detokenizer.choice.token_ids) == len(ids)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 5), max_size=60)
    | st.binary(max_size=80).map(lambda data: byte_ids(BYTE_LEVEL, data))
)
def test_pieces_of_any_byte_level_ids_add_up(ids):
    assert "".join(pieces_of(choice_text(BYTE_LEVEL), ids)) == BYTE_LEVEL.decode(ids)


WELL_FORMED = st.lists(
    st.one_of(
        st.sampled_from([[0], [1], [2], [5000], *([t] for t in range(259, BYTE_FALLBACK.get_vocab_size()))]),
        st.sampled_from(" a\né世🙂\ufffd").map(lambda char: byte_ids(BYTE_FALLBACK, char.encode())),
    ),
    max_size=30,
).map(lambda parts: [token_id for part in parts for token_id in part])


@settings(max_examples=500, deadline=None, derandomize=True)
@given(ids=WELL_FORMED, end=st.sampled_from(["", "e4", "e4b8", "f09f99"]))
def test_pieces_of_byte_fallback_ids_add_up(ids, end):
    detokenizer = choice_text(BYTE_FALLBACK)
    released = "".join(append(detokenizer, [token_id]) for token_id in ids)
    expected = BYTE_FALLBACK.decode(ids)
    # Decoding an unfinished character together with whole ones makes all of them U+FFFD; ours stay whole.
    cut = bytes.fromhex(end)
    assert append(detokenizer, byte_ids(BYTE_FALLBACK, cut)) == ""
    assert released + finish(detokenizer) == expected + REPLACEMENT * len(cut) == detokenizer.choice.text


@settings(max_examples=300, deadline=None, derandomize=True)
@given(ids=st.lists(st.integers(0, BYTE_FALLBACK.get_vocab_size() - 1), max_size=60))
def test_any_byte_fallback_ids_keep_all_that_is_not_a_byte(ids):
    detokenizer = choice_text(BYTE_FALLBACK)
    text = "".join(pieces_of(detokenizer, ids))
    plain = [char for char in BYTE_FALLBACK.decode([t for t in ids if t >= 259]) if char != " "]
    rest = iter(text)
    assert all(char in rest for char in plain)


@BOTH
@settings(max_examples=200, deadline=None, derandomize=True)
@given(prompt=TEXTS.filter(lambda text: not text.endswith(REPLACEMENT)), answer=TEXTS)
def test_the_first_token_is_decoded_in_the_context_of_the_prompt(tokenizer, prompt, answer):
    prompt_ids, ids = tokenizer.encode("x" + prompt).ids, tokenizer.encode(answer).ids
    detokenizer = choice_text(tokenizer, prompt_token_ids=prompt_ids)
    text = "".join(pieces_of(detokenizer, ids))
    assert text == tokenizer.decode(prompt_ids + ids)[len(tokenizer.decode(prompt_ids)) :]


def test_leading_space():
    ids = BYTE_FALLBACK.encode("a lo").ids
    assert pieces_of(choice_text(BYTE_FALLBACK), ids) == ["a", " lo", ""]
    assert pieces_of(choice_text(BYTE_FALLBACK, prompt_token_ids=ids), ids) == [" a", " lo", ""]
    assert pieces_of(choice_text(BYTE_FALLBACK, prompt_token_ids=[1, 2]), ids) == ["a", " lo", ""]
    only_bytes = byte_ids(BYTE_FALLBACK, "é é ".encode()) + ids
    assert append(choice_text(BYTE_FALLBACK), only_bytes) == "é é  a lo"


# --- whole characters, and no waiting for ever ---


@BOTH
def test_an_unfinished_character_is_released_at_the_end_as_the_tokenizer_has_it(tokenizer):
    ids = tokenizer.encode("🥨").ids[:-1]
    detokenizer = choice_text(tokenizer)
    assert append(detokenizer, ids) == ""
    assert finish(detokenizer) == detokenizer.choice.text == tokenizer.decode(ids) != ""
    assert finish(detokenizer) == ""


@pytest.mark.parametrize("byte", [0xE4, 0xFF, 0xBF])
@BOTH
def test_bytes_that_never_complete_are_not_waited_for(tokenizer, byte):
    token_id = byte_ids(tokenizer, [byte])[0]
    detokenizer = choice_text(tokenizer)
    for count in range(1, 200):
        append(detokenizer, [token_id])
        assert len(detokenizer.choice.text) >= count - MAX_UNFINISHED
        assert len(detokenizer._decoder._window) <= MAX_WINDOW_TOKENS
    append(detokenizer, tokenizer.encode("🙂 a").ids)
    finish(detokenizer)
    assert detokenizer.choice.text.startswith(REPLACEMENT * 199)
    assert detokenizer.choice.text.endswith(" a")


def test_tokens_that_begin_and_end_within_characters():
    """A token of the last bytes of one emoji and the first of the next: the text never ends with a whole one."""
    tokenizer = Tokenizer(models.BPE(vocab={"ð": 0, "ŁĻĤð": 1, "a": 2}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    ids = [0] + [1] * 100
    detokenizer = choice_text(tokenizer)
    pieces = pieces_of(detokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids) == "\U0001f642" * 100 + REPLACEMENT
    assert pieces == ["", *["\U0001f642"] * 100, REPLACEMENT]


@BOTH
def test_silent_tokens_are_counted_and_do_not_pile_up(tokenizer):
    detokenizer = choice_text(tokenizer)
    special = tokenizer.token_to_id("<eos>" if tokenizer is BYTE_LEVEL else "</s>")
    assert append(detokenizer, [special, 99_999] * 500) == ""
    assert len(detokenizer.choice.token_ids) == 1000
    assert len(detokenizer._decoder._window) == 0
    assert append(detokenizer, tokenizer.encode("a").ids) == "a"


def test_without_a_tokenizer_there_is_no_text():
    detokenizer = choice_text(None, stop=["a"])
    assert append(detokenizer, [1, 2, 3]) == finish(detokenizer) == detokenizer.choice.text == ""
    assert len(detokenizer.choice.token_ids) == 3
    assert detokenizer.stop_string is None


# --- stop strings ---


STOPS = st.lists(st.text(st.sampled_from("abl o世🙂"), min_size=1, max_size=4), max_size=3)


@BOTH
@settings(max_examples=500, deadline=None, derandomize=True)
@given(
    text=st.text(st.sampled_from("abl o世🙂"), max_size=25), stop=STOPS, sizes=st.lists(st.integers(1, 5), min_size=1)
)
def test_text_is_cut_at_the_stop_string_that_ends_first(tokenizer, text, stop, sizes):
    ids = tokenizer.encode(text).ids
    expected, met = cut_at_stop(tokenizer.decode(ids), stop)
    detokenizer = choice_text(tokenizer, stop)
    begin = turn = 0
    while begin < len(ids):
        append(detokenizer, ids[begin : begin + sizes[turn % len(sizes)]])
        assert expected.startswith(detokenizer.choice.text)
        begin, turn = begin + sizes[turn % len(sizes)], turn + 1
    finish(detokenizer)
    assert (detokenizer.choice.text, detokenizer.stop_string) == (expected, met)
    if met is None:
        assert len(detokenizer.choice.token_ids) == len(ids)
    else:
        consumed = len(detokenizer.choice.token_ids)
        assert cut_at_stop(tokenizer.decode(ids[:consumed]), stop)[1] is not None
        alone = choice_text(tokenizer, stop)
        append(alone, ids[: consumed - 1])
        assert alone.stop_string is None
        num_tokens, rest = detokenizer.choice.before_stop
        assert tokenizer.decode(ids[:num_tokens]) + rest == expected


def test_held_text_is_released_when_it_turns_out_not_to_be_a_stop_string():
    a, b, lo = (BYTE_FALLBACK.token_to_id(piece) for piece in ("a", "b", "lo"))
    detokenizer = choice_text(BYTE_FALLBACK, stop=["blob"])
    assert [append(detokenizer, [t]) for t in (a, b, lo, a, b, lo)] == ["a", "", "", "bloa", "", ""]
    assert finish(detokenizer) == "blo"
    detokenizer = choice_text(BYTE_FALLBACK, stop=["blob"])
    assert [append(detokenizer, [t]) for t in (a, b, lo, b, a)] == ["a", "", "", "", ""]
    assert (detokenizer.choice.text, detokenizer.stop_string, len(detokenizer.choice.token_ids)) == ("a", "blob", 4)
    assert finish(detokenizer) == ""


def test_a_stop_string_that_is_complete_only_with_the_unfinished_character():
    detokenizer = choice_text(BYTE_FALLBACK, stop=[REPLACEMENT])
    assert append(detokenizer, [BYTE_FALLBACK.token_to_id("a"), *byte_ids(BYTE_FALLBACK, [0xE4])]) == "a"
    assert finish(detokenizer) == ""
    assert detokenizer.stop_string == REPLACEMENT


def spoken(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).ids


CALL = '<tool_call>{"name": "f", "arguments": {"a": "x\\n\\ny"}}</tool_call>'
HERMES = ResponseTemplate(
    {
        "start_anchor": "assistant",
        "fields": {
            "tool_calls": {
                "open": "<tool_call>",
                "close": "</tool_call>",
                "content": "json",
                "transform": {"function": "{content}"},
            },
            "content": {},
        },
    }
)
TOOLS = [{"type": "function", "function": {"name": "f"}}]
WHOLE = ToolCallEvent("whole", 0, "f", '{"a": "x\\n\\ny"}')


@pytest.mark.parametrize(("before", "after", "stop", "said", "ended_by"), [
    ("Hm ", "", '"a"', f"Hm {CALL}", None),
    ("Hm", "!END", "\\n\\n", f"Hm{CALL}!END", None),
    ("Hm", "!END", "END", f"Hm{CALL}!", "END"),
    ("HmEND", "", "END", "Hm", "END"),
    ("Hm", " <", "<x", f"Hm{CALL} <", None),
])  # fmt: skip
def test_stop_strings_do_not_count_within_a_call(before, after, stop, said, ended_by):
    detokenizer = choice_text(BYTE_LEVEL, [stop], parser=AnswerParser(HERMES, "", TOOLS))
    text = append(detokenizer, spoken(BYTE_LEVEL, before + CALL + after)) + finish(detokenizer)
    assert (text, detokenizer.stop_string) == (said, ended_by)
    choice = detokenizer.choice
    assert [call.arguments for call in choice.tool_calls] == [WHOLE.arguments] * ("<tool_call>" in said)
    assert choice.content.split() == said.replace(CALL, "\n").split()


def test_a_stop_string_that_begins_before_a_call_and_may_go_on_within_it_does_not_hold_it_back():
    detokenizer = choice_text(BYTE_LEVEL, ["<tool_call>{x"], parser=AnswerParser(HERMES, "", TOOLS))
    assert append(detokenizer, spoken(BYTE_LEVEL, CALL)) + finish(detokenizer) == CALL
    assert [call.arguments for call in detokenizer.choice.tool_calls] == [WHOLE.arguments]


@BOTH
def test_special_tokens_that_delimit_have_a_text_for_the_parser_alone(tokenizer):
    """As with `<|tool_call|>` of Granite: without a parser they are left out, as other special tokens are with it."""
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.add_special_tokens(["<tool_call>", "</tool_call>", "<other>"])
    words = ["a lo", "<other>", "<tool_call>", " f", "</tool_call>", " b"]
    ids = [i for word in words for i in spoken(tokenizer, word)]
    shown = {tokenizer.token_to_id(token): token for token in ("<tool_call>", "</tool_call>")}
    parser = AnswerParser(replace(HERMES, shown_tokens=shown), "", TOOLS)
    seen = choice_text(tokenizer, parser=parser, prompt_token_ids=spoken(tokenizer, "a"))
    text = append(seen, ids) + finish(seen)
    assert "<tool_call>" in text
    assert "</tool_call>" in text
    unseen = choice_text(tokenizer, prompt_token_ids=spoken(tokenizer, "a"))
    assert text.replace("<tool_call>", "").replace("</tool_call>", "") == append(unseen, ids) + finish(unseen)


@BOTH
@pytest.mark.parametrize("parsed", [True, False])
def test_an_answer_cut_by_a_stop_string_keeps_the_tokens_that_delimit_its_parts(tokenizer, parsed):
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.add_special_tokens(["<tool_call>", "</tool_call>"])
    shown = {tokenizer.token_to_id(token): token for token in ("<tool_call>", "</tool_call>")}
    parser = AnswerParser(replace(HERMES, shown_tokens=shown), "", TOOLS) if parsed else None
    text = choice_text(tokenizer, ["lob"], parser=parser)
    kept = [i for word in ("<tool_call>", " f", "</tool_call>", " b") for i in spoken(tokenizer, word)]
    said = [*kept, *spoken(tokenizer, "alob")]
    pieces = [text.add_token(token_id, None, None) for token_id in said]
    choice = text.choice
    choice.finish_reason, choice.stop_reason = pieces[-1].finish_reason, text.stop_string
    template = SimpleNamespace(encode_answer=lambda rest: spoken(tokenizer, rest))
    assert choice.stop_reason == "lob"
    assert answer_ids(template, choice) == [*kept, *spoken(tokenizer, "a")]


def test_pieces_bring_the_events_of_their_text():
    ids = spoken(BYTE_LEVEL, f"Hm{CALL}")
    choice = choice_text(BYTE_LEVEL, parser=AnswerParser(HERMES, "", TOOLS))
    pieces = [choice.add_token(token_id, None, None) for token_id in ids]
    begun, whole = [event for piece in pieces for event in piece.events][-2:]
    assert (begun, replace(whole, id="")) == (ToolCallEvent("begun", 0), WHOLE) and whole.id.startswith("call_")
    assert choice.choice.tool_calls == [ToolCall(whole.id, "f", WHOLE.arguments)] and choice.choice.content == "Hm"
    cut = choice_text(BYTE_LEVEL, parser=AnswerParser(HERMES, "", TOOLS))
    pieces = [cut.add_token(token_id, None, None) for token_id in ids[:-5]]
    last = cut.end("abort")
    assert [event.state for event in last.events] == ["cut"]
    assert last.events[0].arguments == CALL.removeprefix("<tool_call>")[: len(last.events[0].arguments)]
