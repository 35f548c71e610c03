"""Models whose layers keep states: their checkpoints in every tier, lost and refused. What else befalls a request:
test_families.py.
"""

import threading
from functools import partial

import pytest
import torch

from kvstore import CacheTiers, Engine, SamplingParams
from kvstore.admin.offline import OfflineStore
from kvstore.blocks.ids import state_chain
from kvstore.engine.model.states import StatePool
from kvstore.engine.outputs import RequestOutput
from kvstore.errors import ConfigError
from kvstore.remote.names import BlockNames, fleet_secret
from tests.support.buckets import Directory
from tests.support.by_hand import by_hand
from tests.support.engines import chain_of, evict_hbm, evict_memory, greedy, open_engine, settle, tokens
from tests.support.faults import reads_that
from tests.support.models import check_answer, network_of
from tests.support.waiting import TIMEOUT_S

BLOCK = 16


PROMPTS = [tokens(seed, count) for seed, count in enumerate((70, 33, 5, 64))]


def opened(folder, hbm: str = "4MiB", **options: object) -> Engine:
    return open_engine(folder, hbm=hbm, dtype="float32", max_num_batched_tokens=48, **options)


@pytest.mark.parametrize("name", ["Qwen3_5Text", "FalconH1", "Lfm2", "Zamba2"])
def test_states_of_bfloat16_take_half_the_bytes(name, saved_model):
    with opened(saved_model(name), state_dtype="bfloat16") as engine:
        engine.generate([PROMPTS[0]], greedy(4))
        spec = engine.loop.runner.model.spec.state
        pool: StatePool = engine.loop.runner.states
        used = int(pool.rows.any(dim=1).nonzero()[0])
        exact = pool.rows[used].clone()
        pool.unpack([used], pool.packed([used]))
        tensors = [tensor[used].float() for pairs in pool.tensors.values() for _, tensor in pairs]
    assert any(tensor.any() for tensor in tensors)
    assert all(torch.equal(tensor, tensor.bfloat16().float()) for tensor in tensors), "a rounded state stays as it is"
    assert not torch.equal(exact, pool.rows[used])
    assert spec.num_bytes == pytest.approx(2 * spec.stored.num_bytes, rel=0.02)


def test_states_that_are_stored_in_another_dtype_are_others(saved_model, tmp_path):
    model, limits = saved_model("Qwen3_5Text"), {"path": tmp_path, "cpu": "8MiB", "disk": "64MiB"}
    with opened(model, **limits, state_dtype="bfloat16") as engine:
        (made,) = engine.generate([PROMPTS[0]], greedy(40))
        history = PROMPTS[0] + made.token_ids + tokens(9, 4)
    for dtype, num_cached in (("bfloat16", (len(history) - 5) // BLOCK * BLOCK), ("auto", 0)):
        with opened(model, **limits, state_dtype=dtype) as engine:
            (again,) = engine.generate([history], greedy(4))
        assert again.usage.cached_tokens_details.disk == again.usage.cached_tokens == num_cached


def test_a_state_that_cannot_be_read_is_tried_once(saved_model, tmp_path):
    """On a medium that fails for ever, earlier ones are tried, and then everything is computed."""
    model, history = saved_model("Qwen3_5Text"), PROMPTS[0]
    with opened(model, path=tmp_path, cpu="8MiB", disk="64MiB") as engine:
        for _ in range(3):
            (made,) = engine.generate([history], greedy(40))
            history = history + made.token_ids + tokens(9, 4)
        engine.flush()

    def fail() -> None:
        raise OSError("injected")

    with opened(model, path=tmp_path, cpu="8MiB", disk="64MiB") as engine, reads_that(fail):
        (again,) = engine.generate([history], greedy(20))
        assert again.usage.cached_tokens == 0 and engine.stats()["store"]["read_failures"]["failed"] >= 2
        engine.check_integrity()
    check_answer(network_of(model), history, again.token_ids)


def replica(model: str, shared, path=None) -> Engine:
    own = {} if path is None else {"disk": "64MiB", "path": path}
    tiers = CacheTiers("4MiB", "8MiB", remote=shared.url, **own)
    return Engine(model, tiers, device="cpu", load="always", dtype="float32")


@pytest.mark.parametrize(("family", "path"), [("Qwen3_5Text", "store"), ("Gemma3", None)])
def test_another_replica_goes_on_with_the_state_that_is_shared(family, path, saved_model, shared, tmp_path):
    model, paths = saved_model(family), [None if path is None else tmp_path / f"{number}" for number in range(2)]
    with replica(model, shared, paths[0]) as engine:
        (made,) = engine.generate([PROMPTS[0]], greedy(40))
        history = PROMPTS[0] + made.token_ids + tokens(9, 4)
        (warm,) = engine.generate([history], greedy(20))
        settle(engine)
    with replica(model, shared, paths[1]) as engine:
        (again,) = engine.generate([history], greedy(20))
        engine.check_integrity()
    assert again.token_ids == warm.token_ids
    assert again.usage.cached_tokens_details.remote >= (len(history) - 5) // BLOCK * BLOCK


@pytest.mark.parametrize(
    ("family", "harm", "shared"),
    [
        ("Qwen3_5Text", "removed", "redis"), ("Qwen3_5Text", "damaged", "objects"),
        ("Gemma3", "removed", "objects"), ("Gemma3", "damaged", "redis"),
    ],
    indirect=["shared"],
)  # fmt: skip
def test_a_shared_state_that_is_lost_is_computed_and_a_deleted_conversation_leaves_none(
    family, harm, saved_model, shared
):
    model = saved_model(family, tokenizer=True)
    with opened(model) as alone, replica(model, shared) as engine:
        chats = [one.chat("red", system="You answer in one word.") for one in (alone, engine)]
        for text in ("And what is that, if I may ask?", "Who is there?"):
            output = [chat.send(text, greedy(20)) for chat in chats][1]
        evict_memory(engine)
        last = num_computed(output) // BLOCK
        names, stored = BlockNames(fleet_secret(None), engine.facts.fingerprint), engine.connector.parts.store.stored
        state = state_chain(chats[1].window.chain[last - 1], stored.num_state_blocks, BLOCK)
        name = names.of(state[-1])
        if harm == "removed":
            shared.delete(name)
        else:
            value = shared.get(name)
            shared.set(name, value[:-1] + bytes([value[-1] ^ 1]))
        before = num_computed(output)
        expected, output = (chat.send("And why?", greedy(20)) for chat in chats)
        assert output.text == expected.text
        assert output.usage.cached_tokens < before // BLOCK * BLOCK
        assert output.usage.miss.cause == "no_checkpoint"
        failures = engine.stats()["store"]["remote_read_failures"]
        assert failures == {"corrupt": 1} if harm == "damaged" else failures.keys() <= {"missing"}
        settle(engine)
        assert chats[1].send("And when?", greedy(20)).usage.miss is None
        settle(engine)
        engine.admin.delete_session("red")
        settle(engine)
        assert shared.names() == []


@pytest.mark.parametrize(("family", "most"), [("Qwen3_5Text", 4), ("Gemma3", 4 * 3 + 3 * 2)])
def test_a_conversation_has_four_checkpoints_in_the_tiers_at_most(family, most, saved_model, tmp_path):
    """A window of 24 tokens lies in two blocks of 16, and one more is kept for splices; turns may end two blocks before
    the next one begins.
    """
    model = saved_model(family, tokenizer=True)
    with opened(model, path=tmp_path, cpu="16MiB", disk="64MiB", hbm="8MiB") as engine:
        chat = engine.chat("red", system="You answer in one word, in the language of the question. " * 2)
        for _ in range(6):
            chat.send("And what is that? " * 6, greedy(40))
        engine.flush()
        engine.check_integrity()
        layout = engine.loop.runner.model.layout(BLOCK)
        for tier in ("cpu", "disk"):
            num_blocks = engine.stats()[tier]["blocks" if tier == "disk" else "cached_blocks"] - len(chat.window.chain)
            assert 2 * layout.num_state_blocks <= num_blocks <= most * layout.num_state_blocks
        engine.admin.delete_session("red")
        assert engine.stats()["disk"]["blocks"] == engine.stats()["cpu"]["cached_blocks"] == 0


def test_a_model_whose_state_does_not_fit_below_hbm_is_refused(saved_model, tmp_path):
    with pytest.raises(ConfigError, match=r"cpu is 20\.0 KiB, but one state of this model needs"):
        opened(saved_model("Qwen3_5Text"), path=tmp_path, cpu="20KiB")


def test_what_two_conversations_begin_with_is_computed_once(saved_model):
    """Their system prompt ends where the first turn begins; a checkpoint stands at the border before."""
    with opened(saved_model("Qwen3_5Text", tokenizer=True)) as engine:
        system = "You answer in one word, in the language of the question."
        chats = [engine.chat(name, system=system) for name in ("one", "two")]
        asked = "What is that?", "Who is there, and why?"
        usages = [chat.send(text, greedy(4)).usage for chat, text in zip(chats, asked, strict=True)]
    assert usages[0].cached_tokens == 0
    assert usages[1].cached_tokens >= BLOCK


def num_computed(turn: RequestOutput) -> int:
    """All of a conversation but the last token of its answer."""
    return turn.usage.prompt_tokens + turn.usage.completion_tokens - 1


def test_a_fork_goes_on_from_the_state_of_its_last_turn_in_hbm_and_from_disk(saved_model, tmp_path):
    model = saved_model("Qwen3_5Text", tokenizer=True, max_position_embeddings=1024)
    with opened(model, path=tmp_path, cpu="8MiB", disk="64MiB") as engine:
        chat = engine.chat("red")
        ends = [num_computed(chat.send(text, greedy(20))) for text in ("Who is there?", "And why?", "And when?")]
        first = chat.fork("blue", 2).send("And where?", greedy(20))
        assert first.usage.cached_tokens_details.hbm == ends[1] // BLOCK * BLOCK
        engine.flush()
    with opened(model, path=tmp_path, cpu="8MiB", disk="64MiB") as engine:
        for name, end in (("red", ends[2]), ("blue", num_computed(first))):
            details = engine.chat(name).send("Go on.", greedy(4)).usage.cached_tokens_details
            assert details.disk + details.cpu == end // BLOCK * BLOCK
        engine.check_integrity()


@pytest.mark.parametrize("num_more", [0, 1])
@pytest.mark.parametrize("who", ["red", "blue"])
@pytest.mark.parametrize("family", ["Qwen3_5Text", "Gemma3"])
def test_a_session_and_its_fork_do_not_take_states_from_one_another(family, who, num_more, saved_model, tmp_path):
    """What later turns of one replace stands also before the end of the other, or in the window before that."""
    folder = saved_model(family, tokenizer=True, max_position_embeddings=1024)
    with opened(folder, path=tmp_path, cpu="8MiB", disk="64MiB") as engine:
        chat = engine.chat("red")
        for text in ("Who is there?", "And why?"):
            last = chat.send(text, greedy(20))
        both = {"red": chat, "blue": chat.fork("blue")}
        idle, (other,) = both.pop(who), both.values()
        for _ in range(num_more):
            last = idle.send("Yes.", greedy(3))
        for text in ("And where?", "And when?", "And how?", "And who?"):
            other.send(text, greedy(20))
            settle(engine)
        end = num_computed(last)
        evict_memory(engine)
        details = idle.send("Go on.", greedy(4)).usage.cached_tokens_details
        assert details.disk + details.cpu == end // BLOCK * BLOCK


@pytest.mark.parametrize("family", ["Qwen3_5Text", "Gemma3"])
def test_an_evicted_session_leaves_neither_kv_nor_states(family, saved_model, tmp_path):
    folder, path = saved_model(family, tokenizer=True, max_position_embeddings=512), tmp_path / "store"
    with opened(folder, path=path, cpu="8MiB", disk="32MiB") as engine:
        for name in ("red", "blue"):
            chat = engine.chat(name)
            for _ in range(2):
                chat.send(f"My name is {name}, and I live in Turin, where it rains, and that is so.", greedy(12))
        settle(engine)
        num_before = engine.stats()["disk"]["blocks"]
        told = engine.admin.handle("evict", {"session": {"session_id": "red"}})["tiers"]["disk"]["blocks"]
        settle(engine)
        assert told > len(chat.window.chain) and engine.stats()["disk"]["blocks"] == num_before - told
        evict_hbm(engine)
        assert engine.chat("red").send("What?", greedy(1)).usage.cached_tokens == 0
    with OfflineStore(path) as store:
        assert store.handle("evict", {"session": {"session_id": "blue"}})["tiers"]["disk"]["blocks"] > len(
            chat.window.chain
        )


def test_states_of_deleted_conversations_are_overwritten(saved_model):
    with opened(saved_model("Qwen3_5Text", tokenizer=True)) as engine:
        chat = engine.chat("red")
        chat.send("My name is Ada, and I live in Turin.", greedy(20))
        pool: StatePool = engine.loop.runner.states
        assert pool.rows.any()
        engine.admin.delete_session("red")
        assert not pool.rows.any()
        engine.check_integrity()


def test_an_evicted_checkpoint_is_named(saved_model):
    with opened(saved_model("Qwen3_5Text", tokenizer=True)) as engine:
        chat = engine.chat("red")
        chat.send("My name is Ada, and I live in Turin.", greedy(20))
        engine.loop.call(engine.loop.scheduler.manager.states.forget, chat.window.chain)
        usage = chat.send("What is my name?", greedy(4)).usage
        assert usage.cached_tokens == 0
        assert usage.miss is not None and usage.miss.cause == "no_checkpoint"


def test_a_checkpoint_that_found_no_room_is_named_with_its_reason(saved_model, tmp_path):
    with opened(saved_model("Qwen3_5Text", tokenizer=True), path=tmp_path, cpu="2MiB", disk="64MiB") as engine:
        chat, cpu = engine.chat("red"), engine.connector.parts.store.cpu
        chat.send("My name is Ada, and I live in Turin.", greedy(20))
        settle(engine)
        held = engine.loop.call(lambda: [cpu.reserve() for _ in range(cpu.pool.num_blocks - 4)])  # a state has five
        chat.send("What is my name, and where do I live?", greedy(20))
        engine.flush()
        engine.loop.call(lambda: [cpu.release(one) for one in held])
        evict_hbm(engine)
        miss = chat.send("Why?", greedy(4)).usage.miss
        assert (miss.cause, miss.tier, miss.why) == ("no_checkpoint", "disk", "no room in the CPU tier")


@pytest.mark.parametrize("num_tokens", [70, 64])
def test_an_answer_that_a_stop_string_ends_at_once_leaves_the_prompts_checkpoint(num_tokens, saved_model, tmp_path):
    model, prompt = saved_model("Qwen3_5Text", tokenizer=True), tokens(7, num_tokens)
    limits = {"path": tmp_path, "cpu": "8MiB", "disk": "64MiB"}
    with opened(model) as engine:
        (plain,) = engine.generate([prompt], greedy(3))
    with opened(model, **limits) as engine:
        (made,) = engine.generate([prompt], greedy(20, stop=[plain.text[:1]]))
        assert made.finish_reason == "stop" and len(made.token_ids) < 4
        engine.flush()
    with opened(model, **limits) as engine:
        (again,) = engine.generate([prompt + made.token_ids + tokens(8, 9)], greedy(4))
        assert again.usage.cached_tokens_details.disk == 64


def test_a_pool_without_room_for_states_is_refused(saved_model):
    with pytest.raises(ConfigError, match="two states of this model need"):
        opened(saved_model("Qwen3_5Text"), hbm="40KiB")


def test_states_have_their_share_of_hbm(saved_model):
    nums = {}
    for share in (0.2, 0.5, 0.8):
        with opened(saved_model("Qwen3_5Text"), hbm="1MiB", state_share=share) as engine:
            nums[share] = engine.loop.scheduler.manager.states.num_slots, engine.loop.pool.num_blocks
            state_bytes = engine.loop.runner.model.spec.state.num_bytes
    assert [slots for slots, _ in nums.values()] == [int(share * (1 << 20)) // state_bytes for share in nums]
    assert nums[0.2][1] > nums[0.5][1] > nums[0.8][1]
    with pytest.raises(ConfigError, match="state_share is 1; give a number"):
        opened(saved_model("Qwen3_5Text"), state_share=1)


@pytest.mark.parametrize(("family", "place"), [("Qwen3_5Text", "disk"), ("Gemma3", "disk"), ("Qwen3_5Text", "objects")])
def test_where_two_prompts_part_there_is_a_checkpoint_from_then_on(family, place, saved_model, fleet, tmp_path):
    """Nobody says where turns begin. The second prompt finds where they part, the third one begins there."""
    model, common = saved_model(family), tokens(7, 100)
    prompts = [common + tokens(seed, 20) for seed in (1, 2, 3)]
    begin = partial(opened, model, path=tmp_path / "store", cpu="8MiB", disk="64MiB")
    if place == "objects":
        begin = partial(replica, model, Directory(tmp_path / "objects"))
    with begin() as engine:
        for asked in prompts[:2]:
            (made,) = engine.generate([asked], greedy(4))
            engine.flush()
        assert made.usage.cached_tokens in (0, 96), "of windows, HBM has all"
    with begin() as engine:
        (made,) = engine.generate([prompts[2]], greedy(4))
        engine.check_integrity()
    check_answer(network_of(model), prompts[2], made.token_ids)
    details = made.usage.cached_tokens_details
    assert details.disk + details.remote == 96


@pytest.mark.parametrize(("family", "least"), [("Qwen3_5Text", 112), ("Gemma3", 0)])
def test_a_long_prompt_has_a_checkpoint_halfway(family, least, saved_model, tmp_path):
    """It has one if a half takes more than a step, and more tokens than have KV of a checkpoint's bytes; no window is
    kept there.
    """
    model, known = saved_model(family), tokens(7, 240)
    limits = {"path": tmp_path, "cpu": "8MiB", "disk": "64MiB"}
    for changed_at, expected in ((0, 0), (180, least)):
        asked = known[:changed_at] + tokens(8, 240 - changed_at)
        with opened(model, **limits) as engine:
            (made,) = engine.generate([asked], greedy(4))
            assert made.usage.cached_tokens_details.disk == expected
            engine.check_integrity()
            engine.generate([known], greedy(4))
    check_answer(network_of(model), asked, made.token_ids)


def test_each_choice_goes_on_from_its_own_checkpoint_though_hbm_has_blocks_that_were_never_saved(saved_model, tmp_path):
    with opened(saved_model("Qwen3_5Text"), path=tmp_path, cpu="8MiB", disk="64MiB") as engine:
        params = SamplingParams(n=3, temperature=0.7, seed=5, max_tokens=60, ignore_eos=True)
        (made,) = engine.generate([PROMPTS[0]], params)
        for choice in made.choices:
            (again,) = engine.generate([PROMPTS[0] + choice.token_ids + tokens(9, 4)], greedy(4))
            assert again.usage.cached_tokens >= 64
        engine.check_integrity()


@pytest.mark.parametrize("family", ["Qwen3_5Text", "Gemma3"])
def test_the_last_turn_is_answered_again_from_the_turn_before(family, saved_model, tmp_path):
    """Turns are shorter than a window, so that windows overlap."""
    own = {} if family == "Qwen3_5Text" else {"sliding_window": 100}
    model = saved_model(family, tokenizer=True, **own)
    with opened(model, path=tmp_path, cpu="8MiB", disk="64MiB") as engine:
        chat = engine.chat("red", system="You answer in one word.")
        for _ in range(5):
            chat.send("And what is that, if I may ask?", greedy(20))
        ids, starts = list(chat.token_ids), list(chat.window.turn_starts)
        engine.flush()
    with opened(model, path=tmp_path, cpu="8MiB", disk="64MiB") as engine:
        (again,) = engine.generate([ids[: starts[-1]] + tokens(3, 20)], greedy(4))
        engine.check_integrity()
    assert starts[-1] - again.usage.cached_tokens_details.disk <= 3 * BLOCK


@pytest.mark.parametrize("family", ["Qwen3_5Text", "Gemma3"])
def test_a_request_goes_on_in_hbm_once_that_has_more_than_it_waits_for(family, saved_model, tmp_path):
    model, asked, read = saved_model(family, max_position_embeddings=1024), tokens(1, 100), threading.Event()
    options = {"path": tmp_path, "cpu": "16MiB", "disk": "64MiB", "hbm": "16MiB"}
    with opened(model, **options) as engine:
        (first,) = engine.generate([asked], greedy(30))
        engine.flush()
    with opened(model, hbm="16MiB") as engine:
        (longer,) = engine.generate([asked], greedy(96))
    assert longer.token_ids[:30] == first.token_ids
    with by_hand(opened(model, **options)) as engine, reads_that(lambda: read.wait(TIMEOUT_S)):
        ahead = engine.submit(asked, greedy(96))
        behind = engine.submit(asked + longer.token_ids[:86] + tokens(2, 5), greedy(4))
        try:
            while behind.output.finish_reason is None:
                engine.step()
        finally:
            read.set()
        assert longer.token_ids[: len(ahead.output.token_ids)] == ahead.output.token_ids
        assert behind.output.usage.cached_tokens >= 128, "though no read has ended"


def test_a_pin_keeps_a_window_that_is_still_on_its_way_to_the_disk(saved_model, tmp_path):
    model = saved_model("Gemma3", max_position_embeddings=1024, sliding_window=100)
    with opened(model, hbm="2MiB", path=tmp_path, cpu=0, disk="2MiB") as engine:
        store, asked = engine.connector.parts.store, tokens(1, 300)
        (made,) = engine.generate([asked], greedy(20))
        history = asked + made.token_ids
        chain = chain_of(engine, history[:-1])
        with engine.connector.parts.lock:
            store.pin(chain, 3600.0, None, None)
        engine.flush()
        for seed in range(100, 120):
            engine.generate([tokens(seed, 250)], greedy(4))
        engine.flush()
        evict_hbm(engine)
        (again,) = engine.generate([history + tokens(6, 20)], greedy(4))
    assert again.usage.cached_tokens_details.disk >= 300


def test_a_branch_of_a_long_prefix_begins_behind_it(saved_model, tmp_path, request):
    """The first prompt leaves a checkpoint halfway, the second one where it leaves the first."""
    num_common, num_own = 40_000 if request.config.getoption("--long") else 4_000, 300
    model, common = saved_model("Qwen3_5Text", max_position_embeddings=65536), tokens(0, num_common)
    prompts = [common + tokens(branch, num_own) for branch in (1, 2, 3, 4)]
    limits = {"hbm": "256MiB", "max_model_len": num_common + 512, "max_num_batched_tokens": 1024, "dtype": "float32"}
    below = {"path": tmp_path, "cpu": "64MiB", "disk": "512MiB"}

    def cached(engine, prompt):
        (output,) = engine.generate([prompt], greedy(4))
        return output.usage.cached_tokens, output.token_ids

    with open_engine(model, **limits, **below) as engine:
        assert cached(engine, prompts[0])[0] == 0
        assert cached(engine, prompts[1])[0] == (num_common + num_own) // BLOCK // 2 * BLOCK
        assert cached(engine, prompts[2])[0] == num_common
        engine.flush()
    with open_engine(model, **limits, **below) as engine, open_engine(model, **limits) as alone:
        num_cached, answer = cached(engine, prompts[3])
        assert num_cached == num_common
        assert answer == cached(alone, prompts[3])[1]
