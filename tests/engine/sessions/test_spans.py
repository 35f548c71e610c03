"""Spans that a client names: computed once alone, reused wherever they stand; what else changes, and what is left."""

import random
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, count, product

import pytest
import torch
import transformers

from kvstore import ContextLengthError, EngineOverloadedError, RequestError
from kvstore.blocks.ids import Lineage, extend_chain, span_root
from kvstore.engine.client.messages import Forget
from kvstore.engine.sessions.recall import Recall
from kvstore.engine.sessions.spans import LEAST_BLOCKS, with_spans
from kvstore.engine.text.chat_template import without_marks
from kvstore.sessions.record import SessionKey
from tests.support.conversations import (
    PARAMS,
    SYSTEM,
    check_gone,
    check_there,
    failing_to_store,
    kv_of,
    nothing_is_left,
    talk,
)
from tests.support.engines import ask, cached, chain_of, check_closed, counters, evict_hbm, greedy, open_engine, settle
from tests.support.faults import before_each_call
from tests.support.models import network_of

MODEL = {"tokenizer": True, "max_position_embeddings": 1024}
PARAGRAPH = "The lighthouse of Port Ellen was built in 1832 and repaired twice. Its keeper, Mrs. Ross, has seven cats. "
DOCUMENT = "".join(f"{number}. {PARAGRAPH}" for number in range(1, 7))
OTHER = "".join(f"{number}. The harbour is closed in winter, when ice comes from the north. " for number in range(12))


def span(text=DOCUMENT, **changes):
    return {"type": "text", "text": text, "reuse": "reencode", **changes}


def asking(*parts, role="user", **more):
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": role, "content": parts, **more}


def spans_of(engine, *messages):
    """The prompt's ids, and where spans are in them."""
    template = engine.chats.language.template
    plain = [{**message, **_joined(message["content"])} for message in messages]
    return without_marks(template.prompt_ids(template.marked(plain)))


def _joined(content):
    if isinstance(content, str):
        return {}
    starts, found = 0, []
    for part in content:
        found += [(starts, starts + len(part["text"]))] if "reuse" in part else []
        starts += len(part["text"])
    return {"content": "".join(part["text"] for part in content), "reuse": found}


def generated(engine, *messages, count=10, **more):
    return engine.generate([list(messages)], greedy(count), **more)[0]


def num_of(engine):
    """Its prompts so far."""
    return engine.stats()["requests"]["finished"]


# -- against transformers ----------------------------------------------------------------------------------------------
@torch.inference_mode()
def by_transformers(network, ids, places, count):
    """The answer over a cache put together by hand: spans of KV that were computed alone, behind the prompt's first
    token, and in between what is computed on top. places: (begin, first, last) of each, in tokens.
    """
    cache, done = transformers.DynamicCache(config=network.config), 0

    def read(given, start, cache):
        positions = torch.arange(start, start + len(given))[None]
        return network(
            input_ids=torch.tensor([given]), position_ids=positions, past_key_values=cache, use_cache=True
        ).logits[0, -1]

    for begin, end, first, last in places:
        if done < first:
            read(ids[done:first], done, cache)
        alone = transformers.DynamicCache(config=network.config)
        read([ids[0], *ids[begin:end]], begin - 1, alone)
        for layer, (key, value, *_) in enumerate(alone):
            run = slice(first - begin + 1, last - begin + 1)
            cache.update(key[:, :, run], value[:, :, run], layer)
        done = last
    answer, given = [], ids[done:]
    while len(answer) < count:
        logits = read(given, done, cache)
        done += len(given)
        given = [int(logits.argmax())]
        answer += given
    return answer


def places_of(engine, message):
    """The prompt's ids; of each span where it stands, and which whole blocks of it are spliced, in tokens."""
    ids, spans = spans_of(engine, message)
    places = []
    for begin, end in spans:
        last = min(begin - 1 + (end - begin + 1) // 16 * 16, len(ids) - 1) // 16 * 16
        places.append((begin, end, -(-begin // 16) * 16, last))
    return ids, places


@pytest.mark.parametrize("name", ["Llama", "Cohere"])
def test_the_answer_is_that_of_transformers_over_the_same_kv(saved_model, store, name):
    """One span, two with a text in between, two in a row; the first time and again."""
    path = saved_model(name, **MODEL)
    network = network_of(path)
    with open_engine(path, store) as engine:
        for parts in (
            ("Read this: ", span(), " Who?"),
            ("And, again, from another place, read this: ", span(), " Where?"),
            ("Two: ", span(OTHER), " and, beside it, ", span(), " When?"),
            (span(), span(OTHER), "Why?"),
        ):
            ids, places = places_of(engine, asking(*parts))
            assert len(places) == sum(isinstance(part, dict) for part in parts)
            expected = by_transformers(network, ids, places, 10)
            out = generated(engine, asking(*parts))
            assert out.prompt_token_ids == ids and out.token_ids == expected
            behind = places[0][2]
            assert cached(out) == (behind, 0, 0, places[-1][3] - behind)
            evict_hbm(engine)
            out = generated(engine, asking(*parts))
            assert out.token_ids == expected and cached(out) == (0, behind, 0, (len(ids) - 1) // 16 * 16 - behind)
        exact = generated(engine, asking("Read this: " + DOCUMENT + " Who?"))
        assert cached(exact)[3] == 0
        engine.check_integrity()


@pytest.mark.filterwarnings("ignore:the HBM pool holds")
def test_with_too_little_room_each_answer_is_that_of_some_first_spans(model, store):
    """Or of none: where KV is evicted or finds no room, what follows is computed. Six clients at once."""
    network, rng = network_of(model), random.Random(1)
    tiers = {"hbm": "700KiB", "cpu": "800KiB", "disk": "2MiB"}
    texts = (DOCUMENT, OTHER, OTHER[200:] + DOCUMENT[:300])
    with open_engine(model, store, max_num_seqs=4, max_num_batched_tokens=96, **tiers) as engine:
        asked, right = [], []
        for _ in range(8):
            parts = [("a" * rng.randrange(40), span(rng.choice(texts))) for _ in range(rng.randrange(1, 3))]
            asked.append(asking(*chain.from_iterable(parts), "Who?"))
            ids, places = places_of(engine, asked[-1])
            right.append([by_transformers(network, ids, places[:n], 6) for n in range(len(places) + 1)])
        assert cached(generated(engine, asked[0], count=6))[3] > 16 * LEAST_BLOCKS
        order = [rng.randrange(len(asked)) for _ in range(24)]
        with ThreadPoolExecutor(6) as clients:
            outs = list(clients.map(lambda one: generated(engine, asked[one], count=6), order))
        assert all(out.token_ids in right[one] for one, out in zip(order, outs, strict=True))
        settle(engine)


def test_spliced_kv_is_that_of_the_span_alone_rotated_to_its_place(engine):
    ids, ((begin, end),) = spans_of(engine, asking("Read this, please: ", span(), " Who?"))
    generated(engine, asking("Read this, please: ", span(), " Who?"))
    settle(engine)
    source = [ids[0], *ids[begin:end]]
    alone = []
    extend_chain(alone, span_root(engine.facts.root("")), source, 16)
    (made, lineage), own = with_spans(engine.client, ids, [(begin, end)], "", ([], Lineage(engine.facts.root(""))))
    assert own == alone
    parts = engine.connector.parts
    with parts.lock:
        raw, moved = (
            [part[[parts.cpu.arena_block_of(one) for one in blocks]].flatten(0, 1) for layer in parts.arena.layers
             for part in layer]
            for blocks in (alone, made[lineage.splice_index :])
        )  # fmt: skip
    first = lineage.splice_index * 16 - begin + 1
    assert all(torch.equal(new, old[first : first + len(new)]) for new, old in zip(moved, raw, strict=True))
    evict_hbm(engine)
    handle = engine.submit(ids, greedy(1), spliced=(made, lineage))
    list(engine.stream(handle))
    model, caches = engine.loop.runner.model, engine.loop.runner.caches
    blocks = [engine.loop.pool.lookup(one) for one in made[lineage.splice_index :]]
    positions = torch.arange(lineage.splice_index * 16, len(made) * 16)
    for layer, rotation in enumerate(model.rotations):
        key, value = (cache[blocks].flatten(0, 1) for cache in caches[layer])
        assert torch.equal(key, rotation.at(positions).apply(moved[2 * layer]))
        assert torch.equal(value, moved[2 * layer + 1])


# -- a part of a prompt ------------------------------------------------------------------------------------------------
def test_the_ids_of_a_span_are_the_same_wherever_it_stands(engine):
    text = f" {DOCUMENT} <|user|> is a text here, too.\n"
    (alone, ((first, last),)) = spans_of(engine, asking(span(text)))
    for before in ("", "Here: ", "spaces at the end   ", "<|end|> as a text ", "Zeilen\n\n"):
        (ids, ((begin, end),)) = spans_of(engine, asking(before, span(text), "\nWho?"))
        assert ids[begin:end] == alone[first:last], before
        assert engine.tokenizer.decode(ids[begin:end]) == text
        shown = before + text + "\nWho?"
        assert shown in engine.tokenizer.decode(ids) and min(ids) >= 0
        assert engine.tokenizer.convert_tokens_to_ids("<|user|>") not in ids[begin:end]


def test_what_has_no_field_is_as_ever(engine, plain):
    parts = asking("Read this: ", {"type": "text", "text": DOCUMENT}, " Who?")
    text = {"role": "user", "content": f"Read this: {DOCUMENT} Who?"}
    generated(engine, asking("Read this: ", span(), " Who?"))
    before = num_of(engine)
    out, same = generated(engine, parts), generated(engine, text)
    assert num_of(engine) == before + 2
    assert out.prompt_token_ids == same.prompt_token_ids == engine.chats.language.template.prompt_ids([text])
    assert out.token_ids == same.token_ids == plain(out.prompt_token_ids, 10)
    assert cached(out)[3] == cached(same)[3] == 0 and cached(same)[0] > 300


def test_a_short_span_is_computed(engine, plain):
    short = PARAGRAPH[:60]
    out = generated(engine, asking("Now: ", span(short), " Who?"))
    assert len(out.prompt_token_ids) < 16 * LEAST_BLOCKS
    assert num_of(engine) == 1 and out.token_ids == plain(out.prompt_token_ids, 10)


@pytest.mark.parametrize("why", ["states", "windows", "no CPU tier"])
def test_where_nothing_can_be_reused_it_is_computed(saved_model, tmp_path, why):
    name = {"states": "Qwen3_5Text", "windows": "Gemma3", "no CPU tier": "Llama"}[why]
    tiers = {"cpu": 0} if why == "no CPU tier" else {}
    with open_engine(saved_model(name, **MODEL), tmp_path / "store", hbm="8MiB", **tiers) as engine:
        for _ in range(2):
            out = generated(engine, asking("Read this: ", span(), " Who?"))
            assert cached(out)[3] == 0
        chat = engine.chat("one")
        chat.send([asking("Read this: ", span(), " Who?")], PARAMS)
        assert num_of(engine) == 3 and chat.window.lineage.splices == ()


def test_a_prompt_that_no_window_holds_is_refused_before_its_spans_are_computed(engine):
    asked = asking("Read this: ", 3 * OTHER, span(), 3 * OTHER, " Who?")
    ids, _ = spans_of(engine, asked)
    for send in (lambda: generated(engine, asked), lambda: engine.chat("long").send([asked], PARAMS)):
        with pytest.raises(ContextLengthError, match=f"the prompt has {len(ids)} tokens"):
            send()
    assert num_of(engine) == 0


def test_a_span_that_begins_the_prompt_is_computed_with_it(engine):
    bare = ([], Lineage(engine.facts.root("")))
    assert with_spans(engine.client, [2] * 400, [(0, 300)], "", bare) == (bare, [])
    assert num_of(engine) == 0


def test_another_value_is_refused(engine):
    ways = (lambda one: engine.generate([[one]]), lambda one: engine.chat("one").send([one]))
    for reuse, said in product(("exact", "", 1, True, ["reencode"]), ways):
        with pytest.raises(RequestError, match=r"messages.*reuse|content.*reuse") as caught:
            said(asking("Read this: ", span(reuse=reuse), " Who?"))
        assert caught.value.param == "messages"
    assert num_of(engine) == 0


def test_tenants_and_salts_share_no_span(engine):
    asked = asking("Read this: ", span(), " Who?")
    for owner in ({"tenant": "a"}, {"tenant": "b"}, {"tenant": "a", "cache_salt": "s"}, {}):
        made, before = counters(engine)["spliced"], num_of(engine)
        out = generated(engine, asked, **owner)
        assert num_of(engine) == before + 3, "the span is computed for this owner, and what stands before it"
        assert counters(engine)["spliced"] > made and cached(out)[3] > 0
        before = num_of(engine)
        assert generated(engine, asked, **owner).token_ids == out.token_ids and num_of(engine) == before + 1


# -- sessions ----------------------------------------------------------------------------------------------------------
def test_a_session_goes_on_behind_its_spans(opened):
    """In the same process, from disk after a restart, with spans in several turns; and the next turn hits all."""
    engine = opened()
    chat = engine.chat("one", system=SYSTEM)
    talk(chat, 1)
    out = chat.send([asking("Read this: ", span(), " Who?")], PARAMS)
    assert cached(out)[3] > 16 * LEAST_BLOCKS and len(chat.window.lineage.splices) == 1
    assert chat.messages[-2] == {"role": "user", "content": f"Read this: {DOCUMENT} Who?"}
    known = len(chat.token_ids)
    assert chat.send("And?", PARAMS).usage.cached_tokens == (known - 1) // 16 * 16
    out = chat.send([asking("Now this: ", span(OTHER), " What?")], PARAMS)
    assert len(chat.window.lineage.splices) == 2
    known, lineage, blocks = len(chat.token_ids), chat.window.lineage, list(chat.window.chain)
    settle(engine)
    state = engine.sessions.load(SessionKey("", "one"))
    assert (state.token_ids, state.chain) == (chat.token_ids, blocks)
    engine = opened()
    chat = engine.chat("one")
    assert (chat.window.lineage, chat.window.chain) == (lineage, blocks)
    out = chat.send("And?", PARAMS)
    hbm, cpu, disk, reencoded = cached(out)
    assert (hbm, cpu) == (0, 0) and disk + reencoded == (known - 1) // 16 * 16 and disk == lineage.splice_index * 16
    before = num_of(engine)
    other = engine.chat("two", system="Another prompt, of a session of its own, in which the same text stands.")
    out = other.send([asking("What do you make of this? ", span(), " Who?")], PARAMS)
    assert cached(out)[3] > 16 * LEAST_BLOCKS
    assert num_of(engine) == before + 2, "only what stands before the span is computed"
    assert len(chat.window.lineage.splices) == 2 and chat.send("Well?", PARAMS).usage.cached_tokens > known - 32


def test_a_first_turn_with_a_history_has_spans_in_both(engine):
    history = [
        {"role": "system", "content": SYSTEM},
        asking("Read this: ", span()),
        {"role": "assistant", "content": "I have read it."},
        asking("And this: ", span(OTHER), " Who?"),
    ]
    chat = engine.chat("one")
    out = chat.send(history, PARAMS)
    assert len(chat.window.lineage.splices) == 2 and cached(out)[3] > 32 * LEAST_BLOCKS
    assert all(isinstance(message["content"], str) and "reuse" not in message for message in chat.messages)


def test_a_turn_that_is_not_stored_leaves_the_earlier_splice(engine):
    chat = engine.chat("one", system=SYSTEM)
    chat.send([asking("Read this: ", span(), " Who?")], PARAMS)
    known = len(chat.token_ids)
    with failing_to_store(engine), pytest.raises(Exception, match="injected"):
        chat.send([asking("Now this: ", span(OTHER), " What?")], PARAMS)
    assert chat.send("And?", PARAMS).usage.cached_tokens == (known - 1) // 16 * 16


@pytest.mark.parametrize("num_before", range(5))
def test_a_turn_that_fails_leaves_nothing_once_its_session_is_deleted(engine, num_before):
    """A head and a span are computed, then both once more, behind the first splice, and then the turn itself."""
    chat, submitted = engine.chat("one"), count()
    chat.send("Hello", PARAMS)

    def fault(*_, **__):
        if next(submitted) == num_before:
            raise EngineOverloadedError("injected")

    with before_each_call(engine.client, "submit", fault), pytest.raises(EngineOverloadedError):
        chat.send([asking("Read this: ", span(), "and this: " * 9, span(OTHER), " What?")], PARAMS)
    settle(engine)
    root = engine.facts.root("")
    assert next(submitted) == num_before + 1
    assert check_closed(engine, {root, span_root(root)}) >= num_before // 2 * LEAST_BLOCKS
    engine.admin.delete_session("one")
    assert nothing_is_left(engine)


def test_a_turn_that_fails_leaves_others_what_they_have_spliced_too(engine):
    """The same beginning and the same document have the same blocks in all sessions."""
    one, two = (engine.chat(name, system=SYSTEM) for name in ("one", "two"))
    one.send([asking("Read this: ", span(), " Who?")], PARAMS)
    known = talk(one, 2)[-1].usage.cached_tokens
    with failing_to_store(engine), pytest.raises(Exception, match="injected"):
        two.send([asking("Read this: ", span(), " Where?")], PARAMS)
    assert talk(one, 1)[0].usage.cached_tokens > known and talk(one, 1)[0].usage.miss is None


def test_a_truncation_and_edits_go_on_behind_spans(engine):
    chat = engine.chat("one", system=SYSTEM)
    chat.send([asking("Read this: ", span(), " Who?")], PARAMS)
    chat.send([asking("Now this: ", span(OTHER), " What?")], PARAMS)
    talk(chat, 1)
    fork = chat.fork("two")
    assert chat.edit([{"type": "remove", "index": 3}, {"type": "remove", "index": 4}], "reencode").reuse == "reencode"
    assert len(chat.window.lineage.splices) == 1 and cached(talk(chat, 1)[0])[3] > 0
    fork.edit([{"type": "replace", "index": 5, "content": "Another one."}], "exact")
    assert len(fork.window.lineage.splices) == 2 and talk(fork, 1)[0].usage.cached_tokens > 32 * LEAST_BLOCKS
    before = fork.truncated_tokens
    fork.keep_last(1)
    assert fork.truncated_tokens > before and talk(fork, 1)[0].usage.cached_tokens >= 0


def test_where_a_spliced_block_is_lost_everything_is_computed_exactly(engine, plain):
    chat = engine.chat("one", system=SYSTEM)
    chat.send([asking("Read this: ", span(), " Who?")], PARAMS)
    talk(chat, 1)
    settle(engine)
    engine.client.call(Forget(chat.window.chain[chat.window.lineage.splice_end - 1 :], 2.0))
    (out,) = talk(chat, 1)
    assert chat.window.lineage.splices == () and out.token_ids == plain(out.prompt_token_ids, 10)
    state = engine.sessions.load(SessionKey("", "one"))
    assert (state.first_reencoded, tuple(state.splices), state.chain) == (None, (), chat.window.chain)


# -- without sessions --------------------------------------------------------------------------------------------------
class Client:
    """Sends all it has, with the field, every time."""

    def __init__(self, engine):
        self.engine, self.recall, self.messages = engine, Recall(engine.chats), []

    def send(self, *parts):
        self.messages.append({"role": "user", **_joined(asking(*parts)["content"])})
        if not self.messages[-1]["reuse"]:
            del self.messages[-1]["reuse"]
        made = self.recall.prompt("", "", self.messages)
        spliced, earlier = made.with_spans(self.engine.client, "")
        handle = self.engine.submit(made.token_ids, PARAMS, spliced=spliced, earlier=earlier)
        list(self.engine.stream(handle))
        assert handle.output.arrival_s == earlier.begun_s, "the time for its spans is the request's"
        self.recall.note("", "", self.messages, handle.output, handle=handle)
        self.messages.append({"role": "assistant", "content": handle.output.text})
        return handle.output


def test_a_history_that_comes_as_text_finds_its_chain_again(opened):
    """The known conversation says how it was spliced; after a restart that is found again by its spans."""
    engine = opened()
    client = Client(engine)
    client.send("Hello, and read what comes.")
    first = client.send("Read this: ", span(), " Who?")
    assert cached(first)[3] > 16 * LEAST_BLOCKS
    before = num_of(engine)
    second = client.send("And?")
    assert num_of(engine) == before + 1, "nothing else is computed"
    assert second.usage.cached_tokens >= (len(first.prompt_token_ids) + 9) // 16 * 16
    third = client.send("Now this: ", span(OTHER), " What?")
    assert cached(third)[3] > cached(second)[3] + 16 * LEAST_BLOCKS
    settle(engine)
    messages = client.messages
    engine = opened()
    client = Client(engine)
    client.messages = messages
    out = client.send("And?")
    assert out.usage.cached_tokens > len(third.prompt_token_ids) - 32 and num_of(engine) == 1
    assert out.prompt_token_ids[: len(third.prompt_token_ids)] == third.prompt_token_ids


def test_a_history_without_the_field_is_another_one(engine, plain):
    client = Client(engine)
    client.send("Read this: ", span(), " Who?")
    for message in client.messages:
        message.pop("reuse", None)
    out = client.send("And?")
    assert cached(out)[3] == 0 and out.token_ids == plain(out.prompt_token_ids, 10)
    text = {"role": "user", "content": f"Read this: {DOCUMENT} Who?"}
    assert out.prompt_token_ids[:100] == engine.chats.language.template.prompt_ids([text])[:100]


def test_a_tools_result_is_a_span_too(engine):
    call = {"id": "call000001", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    history = [
        {"role": "user", "content": "Read it."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        asking(span(), role="tool", tool_call_id="call000001"),
    ]
    out = generated(engine, *history)
    assert cached(out)[3] > 16 * LEAST_BLOCKS
    assert DOCUMENT in engine.tokenizer.decode(out.prompt_token_ids)


# -- what is left ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["delete", "forget"])
@pytest.mark.parametrize("is_shared", [False, True], ids=["alone", "shared"])
def test_a_spans_chain_goes_with_the_last_session_that_refers_to_it(engine, store, how, is_shared):
    chat = engine.chat("one", system=SYSTEM)
    chat.send([asking("Read this: ", span(), " Who?")], PARAMS)
    talk(chat, 1)
    if is_shared:
        engine.chat("two", system="Another one.").send([asking("And this? ", span(), " Who?")], PARAMS)
    settle(engine)
    turn = engine.sessions.turns(SessionKey("", "one"), 0, 1)[0]
    needles = [part for parts in kv_of(engine, turn.spans).values() for part in parts]
    assert len(needles) > 2 * LEAST_BLOCKS
    check_there(engine, store, needles)
    if how == "delete":
        engine.admin.delete_session("one")
    else:
        chat.edit([{"type": "remove", "index": 1}, {"type": "remove", "index": 2}], "forget")
    if is_shared:
        check_there(engine, store, needles)
        engine.admin.delete_session("two")
    check_gone(engine, store, needles)
    assert engine.admin.verify()["sessions"]["problems"] == ()


def test_a_span_that_is_used_often_outlives_what_is_not(model, store):
    """A splice counts as a use: the span itself is never loaded."""
    with open_engine(model, store, cpu="1MiB", disk=0, eviction="lru") as engine:
        asked = asking("Read this: ", span(), " Who?")
        ids, ((begin, end),) = spans_of(engine, asked)
        once, often = [], []
        extend_chain(often, span_root(engine.facts.root("")), [ids[0], *ids[begin:end]], 16)
        generated(engine, asked)
        for seed in range(6):
            prompt = [seed + 2] * 160
            once.append(chain_of(engine, prompt)[-2])
            ask(engine, prompt)
            generated(engine, asking(f"{seed}: ", span(), " Who?"))
            settle(engine)
        held = [engine.connector.parts.cpu.arena_block_of(one) is not None for one in (*often, once[0])]
        assert held == [True] * len(often) + [False]
