"""`--codec int8` under an engine: what comes back is counted, is never mixed with exact KV, and can be refused.

In bfloat16, on a small random model.
"""

import random

import numpy as np
import pytest

from kvstore import CacheTiers, Engine
from kvstore.admin.offline import OfflineStore
from kvstore.blocks.ids import is_quantised, quantised_id
from kvstore.disk.codec import Codec
from kvstore.engine.sessions.recall import Recall
from kvstore.errors import ConfigError
from kvstore.kernels import int8
from kvstore.sessions.record import SessionKey
from tests.support.conversations import SYSTEM, fill_over, nothing_is_left, talk
from tests.support.engines import (
    Plain,
    ask,
    cached,
    chain_of,
    check_closed,
    counters,
    evict_cpu,
    evict_memory,
    greedy,
    open_engine,
    save_model,
    settle,
    stored_parents,
    tokens,
)
from tests.support.faults import constants, transactions_that
from tests.support.redis_server import wait_for_answers

MODEL = {"tokenizer": True}
PROMPT = tokens(7, 100)
LONG_SYSTEM = "Answer in a few words only, and never say anything about the weather of tomorrow, or of yesterday. " * 2


@pytest.fixture
def again(opened):
    """Opens the store again with int8, or another codec."""
    return lambda codec="int8", **options: opened(codec=codec, dtype="bfloat16", **options)


@pytest.fixture(scope="module")
def plain(model):
    plain = Plain(model, dtype="bfloat16")
    yield plain
    plain.engine.close()


def quantised(out) -> int:
    return out.usage.cached_tokens_details.quantised


def in_arena(engine: Engine, block_ids) -> list[np.ndarray]:
    """The bytes of these blocks, which the CPU tier has."""
    settle(engine)
    parts = engine.connector.parts
    with parts.lock:
        places = [parts.cpu.arena_block_of(block_id) for block_id in block_ids]
        assert None not in places
        return [np.array(parts.arena.view(place)) for place in places]


def roundtrip(raw: np.ndarray) -> np.ndarray:
    stored, out = int8.encode(raw), np.empty_like(raw)
    assert stored is not None and int8.decode(stored, out)
    return out


# -- prompts -----------------------------------------------------------------------------------------------------------
def test_copies_are_read_and_counted_and_an_exact_request_computes(again, plain):
    engine = again()
    answer = ask(engine, PROMPT, 20).token_ids
    history = PROMPT + answer
    chain = chain_of(engine, history[:-1])
    exact = in_arena(engine, chain)
    in_memory = ask(engine, [*history, 1])
    assert cached(in_memory) == (112, 0, 0, 0) and quantised(in_memory) == 0, "what was computed here is exact"
    engine = again()
    copied = ask(engine, [*history, 1])
    assert cached(copied) == (0, 0, 112, 0) and quantised(copied) == 112
    for raw, copy in zip(exact, in_arena(engine, map(quantised_id, chain)), strict=True):
        assert np.array_equal(copy, roundtrip(raw)) and not np.array_equal(copy, raw)
    refused = engine.generate([[*history, 1]], greedy(4, kv_exact=True))[0]
    assert cached(refused) == (0, 0, 0, 0) and quantised(refused) == 0
    assert refused.token_ids == plain([*history, 1], 4)
    computed = in_arena(engine, chain)
    assert not any(np.array_equal(raw, roundtrip(raw)) for raw in computed), "copies under the ids of exact blocks"
    after = ask(engine, [*history, 2])
    assert cached(after) == (112, 0, 0, 0) and quantised(after) == 0, "exact KV is there, and the copies are preferred"
    settle(engine)
    check_closed(engine, {engine.facts.root("")})


def test_each_restart_copies_what_was_computed_behind_copies(again, store, tmp_path, model):
    """Another run of the same codec is the reference."""

    def lives(folder) -> list[list[int]]:
        history, answers = list(PROMPT), []
        for life in range(4):
            with open_engine(model, folder, codec="int8", dtype="bfloat16") as engine:
                for turn in range(2):
                    out = ask(engine, history, 12)
                    num_known = len(history) // 16 * 16 if life or turn else 0
                    assert 0 <= num_known - sum(cached(out)) <= 32, "a turn ends up to two blocks before the next"
                    assert quantised(out) == (sum(cached(out)) if life else 0)
                    answers.append(out.token_ids)
                    history = history + out.token_ids + tokens(20 + 2 * life + turn, 9)
                settle(engine)
                check_closed(engine, {engine.facts.root("")})
        return answers

    assert lives(store) == lives(tmp_path / "other")


def test_branches_share_copies_and_what_is_computed_behind_them(again):
    engine = again()
    for seed in (1, 2):
        ask(engine, PROMPT[:64] + tokens(seed, 40))
    engine = again()
    first, second = (ask(engine, PROMPT[:64] + tokens(seed, 60)) for seed in (1, 2))
    assert cached(first) == (0, 0, 96, 0) and cached(second) == (64, 0, 32, 0)
    third = ask(engine, PROMPT[:64] + tokens(3, 60))
    assert cached(third) == (64, 0, 0, 0) and quantised(third) == 64
    fourth = ask(engine, PROMPT[:64] + tokens(3, 90))
    assert cached(fourth) == (112, 0, 0, 0) and quantised(fourth) == 112


def test_what_is_computed_behind_blocks_that_memory_alone_has_is_stored_behind_their_copies(again):
    engine = again()
    ask(engine, PROMPT)
    evict_cpu(engine)
    longer = PROMPT + tokens(8, 60)
    out = ask(engine, longer)
    assert cached(out) == (96, 0, 0, 0) and quantised(out) == 0
    evict_memory(engine)
    out = ask(engine, [*longer, 1])
    assert cached(out) == (0, 0, 160, 0) and quantised(out) == 160
    check_closed(engine, {engine.facts.root("")})


def test_a_chain_that_began_exactly_stays_exact_and_other_codecs_read_copies(again):
    engine = again("raw")
    ask(engine, PROMPT)
    engine = again("int8")
    longer = PROMPT + tokens(8, 60)
    assert quantised(ask(engine, longer)) == 0
    other = tokens(9, 100)
    ask(engine, other)
    engine = again("raw")
    assert cached(ask(engine, [*longer, 1])) == (0, 0, 160, 0)
    out = ask(engine, [*other, *tokens(10, 60)])
    assert cached(out) == (0, 0, 96, 0) and quantised(out) == 96
    settle(engine)
    disk = engine.connector.parts.disk
    entries = [entry.block_id for batch in disk.scan() for entry in batch]
    headers = {block_id: disk.header(block_id).codec for block_id in entries}
    assert {codec for one, codec in headers.items() if is_quantised(one)} == {Codec.INT8}
    assert {codec for one, codec in headers.items() if not is_quantised(one)} == {Codec.RAW, Codec.EXACT12}
    check_closed(engine, {engine.facts.root("")})


def test_a_chain_that_began_exactly_stays_exact_when_its_writes_fail(again):
    ask(again("raw"), PROMPT)
    engine, num_begun = again("int8"), 0

    def three_fail() -> None:
        nonlocal num_begun
        num_begun += 1
        if num_begun <= 3:
            raise OSError("the disk fails for now")

    waiting = engine.connector.parts.store.disk._io._pending
    with constants(waiting, _batch_bytes=1), transactions_that(three_fail):  # a block each: they come back one by one
        ask(engine, PROMPT + tokens(8, 100))
        settle(engine)
    assert num_begun > 3 and not any(map(is_quantised, stored_parents(engine)))
    check_closed(engine, {engine.facts.root("")})


def test_choices_of_one_prompt_begin_with_the_same_copies(again):
    ask(again(), PROMPT)
    engine = again()
    out = engine.generate([[*PROMPT, 1]], greedy(20, n=3))[0]
    assert cached(out) == (0, 0, 96, 0) and quantised(out) == 96
    assert len({tuple(choice.token_ids) for choice in out.choices}) == 1


def test_flipped_bytes_of_copies_are_computed_and_counted(again, store, plain):
    engine, rng = again(), random.Random(5)
    prompts = [tokens(seed, 100) for seed in range(30, 36)]
    for prompt in prompts:
        ask(engine, prompt)
    settle(engine)
    copies = [quantised_id(rng.choice(chain_of(engine, prompt))) for prompt in prompts[:4]]
    tables = engine.connector.parts.disk.file
    with tables as opened, opened.env.begin(write=True) as txn:
        for block_id in copies:
            value = bytearray(txn.get(block_id, db=opened.values))
            value[-rng.randrange(1, 1000)] ^= 1 << rng.randrange(8)
            txn.put(block_id, bytes(value), db=opened.values)
    engine = again()
    num_hits = 0
    for prompt in prompts:
        out = ask(engine, [*prompt, 1])
        num_hits += sum(cached(out))
        assert quantised(out) in (0, sum(cached(out)))
        if not sum(cached(out)):
            assert out.token_ids == plain([*prompt, 1], 4)
    assert num_hits == 2 * 96 and counters(engine)["read_failures"]["corrupt"] == 4
    settle(engine)
    assert engine.admin.verify()["num_corrupt"] == 0
    check_closed(engine, {engine.facts.root("")})


# -- sessions ----------------------------------------------------------------------------------------------------------
def test_a_session_goes_on_with_copies_turn_by_turn(again, plain):
    chat = again().chat("s", system=SYSTEM)
    talk(chat, 3)
    engine = again()
    chat = engine.chat("s")
    out, second = talk(chat, 2)
    assert quantised(out) == cached(out)[2] > 64 and quantised(second) == cached(second)[0] > quantised(out)
    state = engine.sessions.load(SessionKey("", "s"))
    assert not any(map(is_quantised, state.chain)), "a session names what it shares with those that never saw a copy"
    assert [quantised_id(one) for one in state.chain[: state.splice_end]] == chat.window.chain[: state.splice_end]
    exact = chat.send("And this?", greedy(10, kv_exact=True))
    assert sum(cached(exact)) == 0 and exact.token_ids == plain(exact.prompt_token_ids, 10)
    assert (exact.usage.miss.cause, exact.usage.miss.why) == ("not_loaded", "only a quantised copy is there")
    engine = again()
    engine.prefetch("s")
    settle(engine)
    last = engine.chat("s").send("Once more?", greedy(10))
    assert quantised(last) == sum(cached(last)) > quantised(out)


def test_a_truncated_session_has_copies_of_its_splice(again):
    chat = again().chat("s", system=LONG_SYSTEM)
    fill_over(chat)
    (out,) = talk(chat, 1)
    assert cached(out)[3] > 0 and quantised(out) == 0
    engine = again()
    (out,) = talk(engine.chat("s"), 1)
    assert cached(out)[3] > 0 and quantised(out) == sum(cached(out)) >= cached(out)[3]
    chat = engine.chat("s")
    fill_over(chat)
    (out,) = talk(chat, 1)
    assert cached(out)[3] == sum(cached(out)) > 0, "a splice of copies, of which nothing passes for exact"
    refused = chat.send("And this?", greedy(10, kv_exact=True))
    assert cached(refused)[3] == 0


def test_a_splice_behind_what_is_stored_exactly_stays_exact(again):
    talk(again("raw").chat("s", system=LONG_SYSTEM), 2)
    for name in ("s", "new"):  # the new one begins with the other's system prompt
        chat = again().chat(name, system=LONG_SYSTEM)
        fill_over(chat)
        for _ in range(2):
            (out,) = talk(again().chat(name), 1)
            assert cached(out)[2] >= 48 and cached(out)[3] > 0 and quantised(out) == 0
            assert sum(cached(out)) >= len(out.prompt_token_ids) - 48


@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_pin_keeps_the_copies_of_a_session_that_is_not_back_yet(again, is_pinned):
    talk(again().chat("s", system=LONG_SYSTEM), 3)
    engine = again(disk="1MiB", eviction="lru")
    if is_pinned:
        engine.admin.pin("s", 3600)
    for seed in range(40, 100):
        ask(engine, tokens(seed, 100))
        settle(engine)
    assert engine.connector.parts.store.stats.disk_evictions > 0
    (out,) = talk(engine.chat("s"), 1)
    assert (cached(out)[2] >= 112) == is_pinned


def test_a_turn_that_begins_with_copies_of_its_splice_keeps_them(again):
    """What a fork spliced in the same way has left memory, and has copies on disk."""
    engine = again(hbm="8MiB", cpu="8MiB")
    chat = engine.chat("s", system=LONG_SYSTEM)
    while not chat.truncated_tokens:
        fork = chat.fork(f"fork-{chat.num_turns}") if chat.num_turns else None
        talk(chat, 1)
    settle(engine)
    spliced = chat.window.chain[chat.window.lineage.splice_index :]
    parts = engine.connector.parts
    with parts.lock:
        for block_id in reversed(spliced):
            parts.cpu.forget(block_id)
    engine.loop.call(engine.loop.pool.evict_all)
    (out,) = talk(fork, 1)
    assert quantised(out) == sum(cached(out)) > 0
    settle(engine)
    with parts.lock:
        assert all(parts.store.stored.holds(quantised_id(one)) for one in spliced)


def test_deleting_a_session_reaches_its_copies_and_what_was_computed_behind_them(again):
    talk(again().chat("s", system=SYSTEM), 3)
    engine = again()
    chat = engine.chat("s")
    talk(chat, 2)
    chat.send("Exactly?", greedy(10, kv_exact=True))
    settle(engine)
    engine.admin.delete_session("s")
    assert nothing_is_left(engine)


def test_what_was_computed_behind_blocks_that_memory_alone_has_goes_with_their_copies(again):
    engine = again()
    ask(engine, PROMPT)
    evict_cpu(engine)
    ask(engine, PROMPT + tokens(8, 60))
    settle(engine)
    assert not all(map(is_quantised, stored_parents(engine)))
    engine.connector.upkeep.forget(chain_of(engine, PROMPT)[:2])
    assert stored_parents(engine) == {}


def test_deleting_a_session_that_began_with_copies_of_another_root_leaves_nothing_in_redis(
    model, store, redis, monkeypatch
):
    with open_engine(model, store, codec="int8", dtype="bfloat16") as engine:
        talk(engine.chat("s", system=LONG_SYSTEM), 3)
    wait_for_answers(monkeypatch)
    tiers = CacheTiers("2MiB", "2MiB", "32MiB", store, "raw", remote=redis.url)  # the fleet has a secret of its own
    with Engine(model, tiers, device="cpu", load="always", dtype="bfloat16") as engine:
        talk(engine.chat("s"), 1)
        settle(engine)
        assert len(redis.names()) > 8
        engine.admin.delete_session("s")
        settle(engine)
        assert not redis.names()


def test_a_session_that_is_deleted_without_a_server_takes_its_copies_along(model, store):
    for _ in range(2):
        with open_engine(model, store, codec="int8", dtype="bfloat16") as engine:
            talk(engine.chat("s", system=SYSTEM), 2)
    with OfflineStore(store) as files:
        assert files.disk.num_blocks > 5
        files.delete_session(SessionKey("", "s"))
        assert files.disk.num_blocks == 0


def test_deleting_a_session_keeps_copies_that_another_one_shares(again):
    engine = again()
    for name in ("old", "older"):
        talk(engine.chat(name, system=LONG_SYSTEM), 2)
    engine = again()
    talk(engine.chat("old"), 1)
    talk(engine.chat("new", system=LONG_SYSTEM), 2)  # begins with a copy of the others' system prompt
    settle(engine)
    engine.admin.delete_session("old")
    engine.admin.delete_session("new")
    evict_memory(engine)
    (out,) = talk(engine.chat("older"), 1)
    assert quantised(out) == sum(cached(out)) >= len(out.prompt_token_ids) - 64


# -- what it is not for ------------------------------------------------------------------------------------------------
def test_where_the_codec_is_refused(tmp_path, store, saved_model, fleet, caplog):
    with pytest.raises(ConfigError, match="codec is int8, but remote is set"):
        CacheTiers(cpu="1MiB", disk="1MiB", path=store, codec="int8", remote="redis://host:1/0")
    with pytest.raises(ConfigError, match="codec is int8, but several engines share the disk"):
        open_engine("unused", store, codec="int8", data_parallel_size=2)
    with pytest.raises(ConfigError, match="codec is int8, but the model keeps states or windows"):
        open_engine(saved_model("Qwen3_5Text"), store, codec="int8", dtype="bfloat16")
    with open_engine(save_model(tmp_path / "model"), store, codec="int8") as engine:
        assert "codec is int8, which is for bfloat16" in caplog.text
        ask(engine, PROMPT)
        evict_memory(engine)
        out = ask(engine, [*PROMPT, 1])
        assert cached(out) == (0, 0, 96, 0) and quantised(out) == 0


def test_what_is_exact_stays_exact_when_the_file_is_rewritten(again):
    engine = again("raw")
    ask(engine, PROMPT)
    engine = again("int8")
    other = tokens(9, 100)
    ask(engine, other)
    settle(engine)
    for codec in ("int8", "raw", "int8"):
        engine.admin.compact(codec)
        engine.check_integrity()
        evict_memory(engine)
        assert quantised(ask(engine, [*PROMPT, 1])) == 0
        assert quantised(ask(engine, [*other, 1])) == 96
        evict_memory(engine)


@pytest.mark.parametrize("reuse", ["exact", "forget"])
def test_an_edit_leaves_no_copy_under_an_exact_chain(again, plain, reuse):
    """A truncated conversation, whose head comes back as copies."""
    fill_over(again().chat("s", system=LONG_SYSTEM))
    engine = again()
    chat = engine.chat("s")
    talk(chat, 1)
    assert chat.window.lineage.sources and chat.window.lineage.splice_index
    first = len(chat.window.system) + chat.window.num_dropped
    chat.edit([{"type": "replace", "index": first + 2, "content": "Another one."}], reuse)
    assert not any(map(is_quantised, chat.window.chain))
    exact = chat.fork("fork").send("Go on.", greedy(10, kv_exact=True))
    assert exact.token_ids == plain(exact.prompt_token_ids, 10)


def test_a_history_that_began_with_copies_goes_on_in_memory(again):
    def send(recall, messages):
        made = recall.prompt("", "", messages)
        spliced, earlier = made.with_spans(recall._client, "")
        handle = engine.submit(made.token_ids, greedy(10), spliced=spliced, earlier=earlier)
        list(engine.stream(handle))
        recall.note("", "", messages, handle.output, handle=handle)
        return handle.output

    messages = [{"role": "user", "content": "This is the first message in a long talk about nothing at all."}]
    for _ in range(2):
        engine = again()
        recall = Recall(engine.chats)
        for _ in range(2):
            output = send(recall, messages)
            messages += [output.choices[0].message, {"role": "user", "content": "And what came then?"}]
        settle(engine)
    assert quantised(output) > 0 and output.usage.cached_tokens > len(output.prompt_token_ids) - 48
