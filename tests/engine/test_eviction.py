"""What an engine evicts first: policies, pins, waiting requests, in HBM and below. Small models, real stores."""

import json
from dataclasses import replace

import pytest

from kvstore import AnswerOptions, CacheTiers, Engine, SamplingParams
from kvstore.blocks.records import Evict
from kvstore.engine.outputs import Earlier
from kvstore.errors import ConfigError, RequestError
from kvstore.policy.conversation import Answer
from kvstore.store.history import history_files
from tests.support.by_hand import by_hand
from tests.support.engines import (
    LLAMA_BLOCK_BYTES,
    ask,
    cached,
    chain_of,
    greedy,
    open_engine,
    settle,
    tokens,
)
from tests.support.tools import TOOLS
from tests.support.waiting import wait_until

MODEL = {"tokenizer": True}
BLOCKS = 24  # in HBM
PROMPT = 16 * 6 + 1  # six full blocks and the token that is always computed


@pytest.fixture
def hbm_only(model):
    engines = []

    def opened(**options) -> Engine:
        tiers = CacheTiers(hbm=BLOCKS * LLAMA_BLOCK_BYTES)
        engines.append(by_hand(Engine(model, tiers, device="cpu", max_model_len=256, **options)))
        return engines[-1]

    yield opened
    for engine in engines:
        engine.check_integrity()
        engine.close()


def text_of(engine: Engine, token_id: int) -> str:
    return engine.tokenizer.decode([token_id])


def in_hbm(engine, seed: int) -> int:
    """How many tokens of this prompt would be hit, without asking for it."""
    found = [engine.loop.pool.lookup(block_id) is not None for block_id in chain_of(engine, tokens(seed, PROMPT))]
    return 16 * (found.index(False) if False in found else len(found))


@pytest.mark.parametrize("eviction", ["newest", "", None])
def test_an_unknown_policy_is_refused(model, eviction):
    with pytest.raises(ConfigError, match=r"eviction is .*auto, fifo, lru, return"):
        Engine(model, device="cpu", eviction=eviction)


def test_an_order_of_eviction_as_policy_is_refused_with_the_right_argument():
    with pytest.raises(ConfigError, match="policy is 'lru', an order of eviction; give eviction=lru"):
        Engine(policy="lru")


def test_the_tail_of_a_conversation_goes_before_its_head(hbm_only):
    engine = hbm_only(eviction="lru")
    for seed in range(4):
        ask(engine, tokens(seed, PROMPT), 1)
    assert 0 < in_hbm(engine, 0) < 96, "its head is still a hit"
    assert [in_hbm(engine, seed) for seed in (1, 2, 3)] == [96, 96, 96]


def test_lru_and_fifo_differ_in_what_a_return_is_worth(hbm_only):
    kept = {}
    for eviction in ("lru", "fifo"):
        engine = hbm_only(eviction=eviction)
        for seed in (0, 1, 0, 2, 3, 4):
            ask(engine, tokens(seed, PROMPT), 1)
        kept[eviction] = [in_hbm(engine, seed) for seed in (0, 1)]
    assert kept["lru"][0] > kept["lru"][1] and kept["fifo"][0] < kept["fifo"][1]


def test_what_a_waiting_request_needs_goes_last(hbm_only):
    engine = hbm_only(eviction="lru", max_num_seqs=1)
    for seed in range(4):
        ask(engine, tokens(seed, PROMPT), 1)
    assert in_hbm(engine, 1) == 96
    handles = [engine.submit(tokens(seed, PROMPT), greedy(1)) for seed in (7, 8, 1)]  # 7 and 8 are new and need room
    while not all(handle.done for handle in handles):
        engine.step()
    assert cached(handles[2].output) == (96, 0, 0, 0)


@pytest.mark.parametrize("name", [b"ada", b""])
def test_a_parent_s_own_end_stays_while_a_sub_agent_of_its_name_runs(hbm_only, name):
    engine, named = hbm_only(eviction="lru"), Earlier(conversation=name)
    calls = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logit_bias={9: 100}, stop=[text_of(engine, 9)])
    parent = engine.submit(tokens(0, PROMPT), calls, earlier=named)
    while not parent.done:
        engine.step()
    child = engine.submit([*tokens(0, PROMPT)[:32], *tokens(9, 33)], greedy(100), earlier=named)
    for seed in range(1, 5):
        ask(engine, tokens(seed, PROMPT), 1)
    assert not child.done
    assert in_hbm(engine, 0) == (96 if name else 32), "what they share stays in any case"
    while not child.done:
        engine.step()


@pytest.fixture
def store(model, tmp_path):
    engine = open_engine(model, tmp_path / "store", hbm=40 * LLAMA_BLOCK_BYTES, eviction="lru")
    yield engine
    settle(engine)
    engine.close()


def test_a_pinned_session_outlives_others_until_its_pin_ends(store):
    chat = store.chat("kept")
    chat.send("Keep this for me, please, since I will be back before long.", greedy(60))
    store.admin.pin("kept", 3600)
    for seed in range(20):
        ask(store, tokens(seed, PROMPT), 1)
    assert all(store.loop.pool.lookup(block_id) is not None for block_id in chat.window.chain)
    store.admin.pin("kept", 0)
    for seed in range(20, 40):
        ask(store, tokens(seed, PROMPT), 1)
    assert store.loop.pool.lookup(chat.window.chain[-1]) is None


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), "60", True, 1e9])
def test_a_pin_needs_a_time(store, seconds):
    store.chat("s").send("Hello", greedy(2))
    with pytest.raises(RequestError, match="seconds"):
        store.admin.pin("s", seconds)


@pytest.mark.parametrize("ttl_s", [-1, 0, float("nan"), float("inf"), "60", True])
def test_a_ttl_needs_a_time(store, ttl_s):
    chat = store.chat("s")
    chat.send("Hello", greedy(2))
    with pytest.raises(RequestError, match="seconds"):
        chat.set_ttl(ttl_s)


def test_what_an_eviction_would_evict_is_what_it_evicts(store):
    for seed in range(4):
        ask(store, tokens(seed, PROMPT), 1)
    settle(store)
    for what in (Evict(to_bytes=10 * LLAMA_BLOCK_BYTES), Evict(unused_for_s=0.0)):
        told = store.admin.evict(replace(what, dry_run=True))
        assert told["disk"].num_blocks > 0 and store.admin.evict(what) == told


def test_a_session_about_to_expire_goes_first(store):
    chat = store.chat("short")
    chat.send("This will not be needed for long, and then it may as well go.", greedy(60))
    for seed in range(2):
        ask(store, tokens(seed, PROMPT), 1)
    chat.send("And once more.", greedy(20))  # used last
    chat.set_ttl(1e-6)
    for seed in range(2, 7):
        ask(store, tokens(seed, PROMPT), 1)
    assert store.loop.pool.lookup(chat.window.chain[-1]) is None and in_hbm(store, 1) == 96


def test_conversations_are_recognised_after_a_restart(model, tmp_path):
    with open_engine(model, tmp_path / "store") as engine:
        ask(engine, tokens(1, PROMPT), 1)
    with open_engine(model, tmp_path / "store") as engine:
        wait_until(lambda: engine.stats()["policy"]["num_conversations"] >= 1, "the index is loaded")
        ask(engine, [*tokens(1, PROMPT), *tokens(2, 40)], 1)
        assert engine.stats()["policy"]["num_returns_learned"] >= 1


@pytest.mark.parametrize("disk", [0, 1 << 24], ids=["hbm only", "a store"])
def test_how_an_answer_ended_is_known_of_its_conversation(model, disk, tmp_path):
    hbm = BLOCKS * LLAMA_BLOCK_BYTES
    tiers = CacheTiers(hbm=hbm, cpu=hbm if disk else 0, disk=disk, path=tmp_path)
    with by_hand(Engine(model, tiers, device="cpu", max_model_len=256)) as engine:
        endings = [
            SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logit_bias={9: 100}),
            SamplingParams(
                temperature=0, max_tokens=9, ignore_eos=True, logit_bias={9: 100}, stop=[text_of(engine, 9)]
            ),
        ]
        found = []
        for seed, params in enumerate(endings):
            handle = engine.submit(tokens(seed, PROMPT), params)
            while not handle.done:
                engine.step()
            steering = engine.connector.parts.store.steering if disk else engine.connector._steering
            conversation = steering.conversation_of(chain_of(engine, tokens(seed, PROMPT)))
            found.append(conversation.answer)
    assert found == [Answer(5), Answer(1, calls_tool=True)]


@pytest.mark.parametrize("process", ["own", "here"])
def test_a_call_of_a_tool_is_known_however_the_model_writes_it(process, tmp_path):
    """The built-in model has no token for it, so only whoever parses its answer knows."""
    tiers = CacheTiers("8MiB", "16MiB", "32MiB", tmp_path)
    with Engine(None, tiers, device="cpu", process=process) as engine:
        params = SamplingParams(max_tokens=80, n=2, seed=4)
        must = AnswerOptions(TOOLS, "required", parallel_tool_calls=False)
        (called,) = engine.generate([[{"role": "user", "content": "Hello"}]], params, tools=must)
        assert all(choice.tool_calls for choice in called.choices)
        engine.generate([[{"role": "user", "content": "Goodbye"}]], params, tools=AnswerOptions(TOOLS, "none"))
    lines = [json.loads(line) for file in history_files(tmp_path) for line in file.read_text().splitlines()]
    assert [line.get("calls_tool", False) for line in lines] == [True, False], lines
