"""Planted causes of misses, each of which the usage names: what differs in the prompt, and what the tiers have lost."""

import os
import shutil
import signal
from contextlib import contextmanager, nullcontext

import pytest

from bench.campaign.servers import value_pages
from kvstore import AnswerOptions, CacheTiers, Engine, SamplingParams
from kvstore.admin.commands import EvictRequest
from kvstore.admin.offline import OfflineStore
from kvstore.blocks.records import Evict, ReadResult
from kvstore.engine.client.messages import EvictBlocks
from kvstore.engine.sessions.misses import common_prefix
from kvstore.engine.sessions.recall import Recall
from kvstore.engine.text.prompts import NO_OPTIONS
from kvstore.policy.planner import LoadChoice, Way
from tests.support.engines import evict_cpu, evict_hbm, greedy, open_engine, settle
from tests.support.faults import before_each_load, constants, disk_that
from tests.support.redis_server import RedisServer, wait_for_answers
from tests.support.shared_sessions import SECRET_TEXT
from tests.support.tools import CLOCK, TOOLS, WEATHER
from tests.support.waiting import wait_until

MODEL = {"tokenizer": True}
MUST = AnswerOptions(TOOLS, "required", parallel_tool_calls=False)
LONG = "Tell me about the sea, and how far it is from here, and then about every river that ends in it."


@pytest.fixture(scope="module")
def builtin():
    with Engine(device="cpu", seed=3) as engine:
        yield engine
        engine.check_integrity()


class Client:
    """Stateless, as the routes are: sends all it has, and keeps what it was told. messages: of a conversation; name: of
    it.
    """

    def __init__(
        self, engine: Engine, tenant: str, system: str = "Be brief, and say only what you know for certain.", name=""
    ):
        self.engine, self.recall, self.tenant, self.name = engine, Recall(engine.chats), tenant, name
        self.messages = [{"role": "system", "content": system}]

    def send(self, *said, options=NO_OPTIONS, salt="", params=None, reasoning=""):
        """The output. reasoning: which the answer is taken to begin with."""
        self.messages += [{"role": "user", "content": one} if isinstance(one, str) else one for one in said]
        made = self.recall.prompt(self.tenant, salt, self.messages, options, self.name)
        language = self.engine.chats.language
        params = language.constrained(params or greedy(20), options)
        handle = self.engine.submit(
            made.token_ids, params, self.tenant, salt, turn_starts=made.turn_starts, parser=language.parser(options),
            earlier=made.earlier,
        )  # fmt: skip
        list(self.engine.stream(handle))
        output = handle.output
        if reasoning:
            output.choices[0].reasoning, output.choices[0].parsed_content = reasoning, output.text[10:]
        self.recall.note(self.tenant, salt, self.messages, output, "", options, handle, self.name)
        self.messages.append({k: v for k, v in output.choices[0].message.items() if k != "reasoning_content"})
        return output

    def calls(self, **more):
        """An answer with a call, and the message with its result."""
        output = self.send(LONG, options=MUST, params=SamplingParams(seed=4, max_tokens=80), **more)
        return {"role": "tool", "tool_call_id": output.tool_calls[0].id, "content": "It is sunny."}


def miss_of(output, cause, message=None, role=None):
    """Its miss, which must be this one: its tokens are those that were not cached though they could have been."""
    miss = output.usage.miss
    assert miss is not None, f"no miss: {output.usage}"
    assert (miss.cause, miss.message, miss.role) == (cause, message, role), miss
    assert miss.tokens > 0 and miss.tokens % 16 == 0
    assert miss.token // 16 * 16 >= output.usage.cached_tokens or miss.cause == "not_loaded"
    return miss


# -- what differs in the prompt ----------------------------------------------------------------------------------------
def test_turns_that_hit_have_no_miss(builtin):
    client = Client(builtin, "hits")
    outputs = [client.send(text) for text in ("Hello", LONG, "Go on.")]
    client.messages[-2:] = []  # another answer to the same question
    outputs += [client.send("And then?"), client.send(LONG)]
    assert [output.usage.miss for output in outputs] == [None] * 5
    assert all(output.usage.cached_tokens for output in outputs[1:])
    first = Client(builtin, "hits").send("Hello")
    assert first.usage.cached_tokens and first.usage.miss is None


@pytest.mark.parametrize("index", [1, 2, 3], ids=["user", "assistant", "later user"])
def test_an_edited_message(builtin, index):
    client = Client(builtin, f"edited {index}")
    for text in (LONG, LONG, LONG):
        client.send(text)
    before = client.recall.prompt_ids(client.tenant, "", client.messages)
    client.messages[index]["content"] = "No: " + client.messages[index]["content"]
    output = client.send("Go on.")
    miss = miss_of(output, "edit", index, client.messages[index]["role"])
    assert miss.token == common_prefix(before, output.prompt_token_ids)
    assert client.send("And now?").usage.miss is None


def test_edited_arguments(builtin):
    client = Client(builtin, "arguments")
    result = client.calls()
    call = client.messages[-1]["tool_calls"][0]
    call["function"]["arguments"] = '{"city": "Paris", "days": 12345, "why": "an afterthought of somebody"}'
    miss_of(client.send(result, options=AnswerOptions(TOOLS)), "edit", 2, "assistant")


def test_tools_that_change(builtin):
    options = [AnswerOptions(tools) for tools in ([WEATHER], [WEATHER, CLOCK], [CLOCK, WEATHER], [])]
    client = Client(builtin, "tools")
    assert client.send(LONG, options=options[0]).usage.miss is None
    assert miss_of(client.send(LONG, options=options[1]), "tools").token > 16
    miss_of(client.send(LONG, options=options[2]), "tool_order")
    assert client.send(LONG, options=options[2]).usage.miss is None
    miss_of(client.send(LONG, options=options[3]), "tools")
    choice = AnswerOptions([CLOCK, WEATHER], "none")
    client.send(LONG, options=options[2])
    assert client.send("x", options=choice).usage.miss is None  # how tools may be used is not in the prompt


def test_variables_of_the_template(tmp_path):
    template = "{{ 'Style: ' + (style or 'plain') * 8 }}{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}"
    template += "{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    (tmp_path / "own.jinja").write_text(template)
    with Engine(device="cpu", chat_template=str(tmp_path / "own.jinja")) as engine:
        client = Client(engine, "variables")
        client.send(LONG)
        other = AnswerOptions(chat_template_kwargs={"style": "baroque"})
        assert miss_of(client.send(LONG, options=other), "template").token < 16
        assert client.send(LONG, options=other).usage.miss is None


def test_thinking_that_the_template_drops(builtin):
    client = Client(builtin, "thinking")
    client.send(LONG)
    client.send("Tell me a story.", reasoning="Hm.")
    output = client.send("Go on.")
    miss = miss_of(output, "thinking", 4, "assistant")
    assert miss.token >= output.usage.cached_tokens > 0


def test_a_head_that_changes_at_each_request(builtin):
    client = Client(builtin, "head")
    client.send(LONG)
    assert [cause_at(client, minute) for minute in range(3)] == ["edit", "head", "head"]


def cause_at(client, minute):
    """The cause of the miss of a request whose head shows the time."""
    client.messages[0]["content"] = f"It is 12:0{minute} o'clock. Be brief, and say only what you know for certain."
    output = client.send(LONG)
    return miss_of(output, output.usage.miss.cause, 0, "system").cause


@pytest.mark.parametrize(("name", "num_answers"), [("ada", 0), ("ada", 1), ("", 1)])
def test_a_head_that_changes_while_the_answer_does_not_come_back(builtin, name, num_answers):
    """The client asks the same again, and nothing of this server's may be in what it sends."""
    client = Client(builtin, f"asked again, {name} {num_answers}", name=name)
    for _ in range(num_answers):
        client.send(LONG)
    kept = list(client.messages)
    causes = []
    if not num_answers:
        assert client.send(LONG).usage.miss is None
    for minute in range(3):
        client.messages = [dict(message) for message in kept]
        causes.append(cause_at(client, minute))
    assert causes == ["edit", "head", "head"]


def test_a_system_message_that_was_edited_once_is_no_changing_head(builtin):
    client = Client(builtin, "edited head", name="ada")
    client.send(LONG)
    kept = client.messages[:1]
    client.messages = [dict(kept[0])]
    assert cause_at(client, 0) == "edit"
    client.messages = [dict(kept[0], content=client.messages[0]["content"])]
    assert client.send(LONG).usage.miss is None
    assert client.send(LONG).usage.miss is None
    client.messages[0]["content"] = kept[0]["content"]
    client.messages[1]["content"] = "No: " + LONG
    assert client.send("Go on.").usage.miss.cause == "edit"


def test_agents_with_one_name_and_one_system_message_are_not_taken_for_each_other(builtin):
    client = Client(builtin, "sub-agents", name="ada")
    client.send(LONG)
    client.messages[1:] = []
    assert client.send("No: " + LONG).usage.miss is None


def test_another_salt(builtin):
    client = Client(builtin, "salt")
    result = client.calls(salt="one")
    miss = miss_of(client.send(result, options=AnswerOptions(TOOLS), salt="two"), "salt")
    assert miss.token == 0
    client = Client(builtin, "salt, guessed")
    client.send(LONG, salt="one")
    assert client.send(LONG, salt="two").usage.miss is None, "who can guess a conversation must not learn of it"


def test_another_tenant_is_told_nothing(builtin):
    client = Client(builtin, "mine")
    result = client.calls()
    client.tenant = "yours"
    assert client.send(result, options=AnswerOptions(TOOLS)).usage.miss is None


# -- sessions ----------------------------------------------------------------------------------------------------------
def test_a_session_names_its_misses(builtin):
    chat = builtin.chat("tools")
    chat.send(LONG, greedy(20), [WEATHER])
    assert chat.send(LONG, greedy(20), [WEATHER]).usage.miss is None
    miss_of(chat.send(LONG, greedy(20), [CLOCK]), "tools")
    miss_of(chat.send(LONG, greedy(20)), "tools")


@pytest.mark.parametrize("reuse", ["exact", "reencode"])
def test_turns_that_made_room(reuse, saved_model, tmp_path):
    with open_engine(saved_model(**MODEL, max_position_embeddings=512), tmp_path / "store") as engine:
        chat = engine.chat("long", system="Be brief, and say only what you know for certain.", truncation_reuse=reuse)
        usages = [chat.send(f"{number}: {LONG}", greedy(30)).usage for number in range(12)]
        misses = [usage.miss for usage in usages if usage.miss is not None]
        assert chat.truncated_tokens
        if reuse == "reencode":
            assert not misses and any(usage.cached_tokens_details.reencoded for usage in usages)
        else:
            assert {(miss.cause, miss.role) for miss in misses} == {("truncation", "user")}


@pytest.mark.parametrize("is_opened_again", [False, True])
def test_turns_that_were_dropped_by_hand(opened, is_opened_again):
    engine = opened()
    chat = engine.chat("long", system="Be brief.", truncation_reuse="exact")
    for number in range(4):
        chat.send(f"{number}: {LONG}", greedy(20))
    chat.keep_last(2)
    if is_opened_again:
        settle(engine)
        chat = opened().chat("long")
    known = len(chat.token_ids)
    output = chat.send("Go on.", greedy(4))
    miss = miss_of(output, "truncation", 1, "user")
    assert miss.tokens == (known - miss.token) // 16 * 16 and output.usage.cached_tokens <= miss.token


def test_kv_that_was_moved_and_is_refused(opened):
    engine = opened()
    chat = engine.chat("moved", system="Be brief, and say only what you know for certain.")
    for number in range(4):
        chat.send(f"{number}: {LONG}", greedy(20))
    chat.keep_last(2)
    assert chat.send("Go on.", greedy(4)).usage.cached_tokens_details.reencoded
    fork = chat.fork("fork")
    miss = miss_of(chat.send("And now?", greedy(4, kv_exact=True)), "not_loaded", 0, "system")
    assert miss.why == "only re-encoded KV is there" and miss.token == fork.window.lineage.splice_index * 16
    engine.admin.evict(Evict(everything=True))
    assert miss_of(fork.send("And now?", greedy(4, kv_exact=True)), "evicted").token == 0


def test_other_weights(model, saved_model, tmp_path):
    with open_engine(model, tmp_path / "store") as engine:
        engine.chat("ada").send(LONG, greedy(20))
    with open_engine(saved_model(**MODEL, seed=1), tmp_path / "store") as engine:
        chat = engine.chat("ada")
        miss_of(chat.send("Go on.", greedy(20)), "weights")
        assert chat.send("And now?", greedy(20)).usage.miss is None


# -- what the tiers have lost ------------------------------------------------------------------------------------------
def begun(engine, session_id="ada"):
    """A session with a turn of several blocks."""
    chat = engine.chat(session_id)
    assert len(chat.send(f"{session_id}: {LONG}{LONG}", greedy(20)).prompt_token_ids) > 64
    return chat


def lost(chat, cause, tier, why=None, token=0):
    """The miss of its next turn."""
    before = chat.token_ids
    output = chat.send("Go on.", greedy(4))
    miss = miss_of(output, cause, None if token == 0 else 0, None if token == 0 else "user")
    assert (miss.tier, miss.why) == (tier, why), miss
    assert miss.tokens == (len(before) - 1) // 16 * 16 - output.usage.cached_tokens
    return miss


@pytest.mark.parametrize(("cpu", "tier"), [(None, "hbm"), ("2MiB", "cpu")])
def test_evicted_for_room(model, tmp_path, cpu, tier):
    path = None if cpu is None else tmp_path / "store"
    with open_engine(model, path, cpu=cpu, disk=0) as engine:
        chat = begun(engine)
        settle(engine)
        if cpu is not None:
            with engine.connector.parts.lock:
                engine.connector.parts.cpu.pool.evict_all()
        engine.loop.call(engine.loop.pool.evict_all)
        assert lost(chat, "evicted", tier).at_s > 0


def test_evicted_from_disk(model, tmp_path):
    with open_engine(model, tmp_path / "store", cpu=0, disk="32MiB") as engine:
        chat = begun(engine)
        evict_hbm(engine)
        with engine.connector.parts.lock:
            assert engine.connector.parts.store.disk.evict(1 << 30)
        lost(chat, "evicted", "disk")
        settle(engine)
        engine.admin.evict(Evict(everything=True))
        lost(chat, "evicted", "disk", "by hand")


def test_deleted_with_another_session(model, tmp_path):
    with open_engine(model, tmp_path / "store") as engine:
        chat, client = begun(engine), Client(engine, "", system="")
        client.messages = [dict(message) for message in chat.messages]
        client.recall.note("", "", client.messages[:-1], chat.last, "somebody's")
        engine.admin.delete_session("ada")
        miss_of(client.send("Go on."), "deleted")


def test_not_written(model, tmp_path):
    with open_engine(model, tmp_path / "store", cpu=0, disk_per_tenant="4KiB") as engine:
        chat = begun(engine)
        evict_hbm(engine)
        lost(chat, "not_written", "disk", "its tenant has on disk what it may have")


@contextmanager
def full_cpu(engine):
    """In here others hold the whole CPU tier."""
    parts = engine.connector.parts
    with parts.lock:
        held = parts.cpu.pool.allocate(parts.cpu.pool.num_free)
    yield
    with parts.lock:
        parts.cpu.pool.release(held)


def test_not_saved(model, tmp_path):
    with open_engine(model, tmp_path / "store") as engine:
        with full_cpu(engine):
            chat = begun(engine)
        evict_hbm(engine)
        lost(chat, "not_written", "cpu", "no room in the CPU tier")


def test_not_written_as_there_is_no_disk(model):
    with Engine(model, CacheTiers("2MiB", "2MiB"), device="cpu", load="always", process="own") as engine:
        life = engine.core.life
        begun(engine)
        os.kill(engine.core.pid, signal.SIGKILL)
        wait_until(lambda: engine.core.life != life and engine.core.state == "running")
        lost(engine.chat("ada"), "not_written", None, "no disk, and the engine has started since")


@pytest.fixture(scope="module")
def left(model, tmp_path_factory):
    """A store that an engine with a session has left in order."""
    folder = tmp_path_factory.mktemp("left") / "store"
    with open_engine(model, folder) as engine:
        begun(engine)
    return folder


@pytest.fixture
def kept(left, store):
    """A copy of it."""
    return shutil.copytree(left, store)


def test_damaged_blocks(model, kept):
    content = bytearray((kept / "blocks/data.mdb").read_bytes())
    for start in value_pages(content):
        content[start + 600] ^= 1
    (kept / "blocks/data.mdb").write_bytes(content)
    with open_engine(model, kept) as engine:
        lost(engine.chat("ada"), "damaged", "disk", "corrupt")


def test_blocks_that_cannot_be_read(model, kept):
    with disk_that(read=lambda *_: ReadResult.FAILED), open_engine(model, kept) as engine:
        lost(engine.chat("ada"), "unreadable", "disk", "failed")


@pytest.mark.parametrize("how", ["removed", "damaged"])
def test_a_store_that_was_replaced(model, kept, how):
    if how == "removed":
        shutil.rmtree(kept / "blocks")
    else:
        (kept / "blocks/data.mdb").write_bytes(bytes(1 << 16))
    with nullcontext() if how == "removed" else pytest.warns(RuntimeWarning, match="moved to quarantine"):
        engine = open_engine(model, kept)
    with engine:
        assert lost(engine.chat("ada"), "store_replaced", "disk").at_s > 0


def test_what_a_predecessor_did_is_not_guessed(model, kept):
    with OfflineStore(kept) as offline:
        offline.evict(EvictRequest(everything=True))
    with open_engine(model, kept) as engine:
        lost(engine.chat("ada"), "unknown", None, "the engine has started since")


def test_a_remote_tier_that_is_away(model, tmp_path, monkeypatch):
    wait_for_answers(monkeypatch)
    monkeypatch.setenv("KVSTORE_FLEET_SECRET", SECRET_TEXT)
    with RedisServer(tmp_path) as redis:
        tiers = CacheTiers("2MiB", "2MiB", remote=redis.url)
        with Engine(model, tiers, device="cpu", load="always") as engine:
            chat = begun(engine)
            evict_cpu(engine)
            evict_hbm(engine)
            redis.kill()
            begun(engine, "other")
            wait_until(lambda: engine.stats()["remote"]["degraded"] is not None)
            lost(chat, "remote_away", "remote")


@pytest.mark.parametrize("num_blocks", [None, 2], ids=["whole", "the rest was evicted"])
def test_loads_that_fail(model, tmp_path, num_blocks):
    """The first one that it computes is told."""
    with open_engine(model, tmp_path / "store") as engine:
        chat = begun(engine)
        settle(engine)
        engine.client.call(EvictBlocks(Evict(block_ids=frozenset(chat.window.chain[num_blocks or 99 :]))))
        evict_hbm(engine)

        def fail(layer, tear):
            tear()
            raise RuntimeError("injected")

        with before_each_load(fail):
            lost(chat, "load_failed", "cpu")


def test_a_disk_that_is_slower_than_computing(model, kept):
    with open_engine(model, kept) as engine:
        chat, planner = engine.chat("ada"), engine.connector.parts.store.planner
        with constants(planner, choose=lambda *_: LoadChoice(Way.COMPUTE)):
            lost(chat, "not_loaded", "disk", "computing is quicker")


def test_no_room_to_read(model, kept):
    with open_engine(model, kept) as engine, full_cpu(engine):
        lost(engine.chat("ada"), "not_loaded", "disk", "no room to read it")


def test_blocks_that_are_still_being_saved(model, tmp_path):
    with open_engine(model, tmp_path / "store") as engine:
        store = engine.connector.parts.store
        with constants(store.steps, end_steps=lambda: None):
            chat = begun(engine)
            engine.loop.call(engine.loop.pool.evict_all)
            with constants(store.planner, choose=lambda *_: LoadChoice(Way.COMPUTE)):
                lost(chat, "being_written", "cpu")
