"""Two servers, one that prefills and one that decodes, over one Redis: one conversation, whatever happens to the first.

Tokens are those of one server alone. And POST /prefill itself: who may call it, and that all blocks of a prompt are in
the shared tier before it says so.
"""

import itertools
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvstore import CacheTiers, Engine
from kvstore.remote.names import PREFILL_KEY, fleet_secret
from kvstore.service.server import fleet_key_of
from kvstore.store import remote
from tests.support.buckets import Directory
from tests.support.engines import greedy, tokens
from tests.support.faults import constants
from tests.support.redis_server import RedisServer, free_port
from tests.support.service.server_process import ServerProcess, launch
from tests.support.service.serving import KEY, Serving, serving
from tests.support.service.talking import SHORT, chat
from tests.support.shared_sessions import SECRET_TEXT, answers_without_a_store, secret_file
from tests.support.waiting import TIMEOUT_S, wait_until

PROMPT = tokens(1, 160)


class Pair:
    """prefill is a process, which may be killed and started again on its port."""

    def __init__(self, folder: Path) -> None:
        (folder / "redis").mkdir()
        self.folder, self.port, self.redis = folder, free_port(), RedisServer(folder / "redis")
        self.url = f"http://127.0.0.1:{self.port}"
        self.prefill = self.start()

    def start(self) -> ServerProcess:
        flags = ("--disk", "0", "--role", "prefill", "--port", str(self.port), "--remote", self.redis.url)
        return launch(self.folder / "prefill", *flags, "--fleet-secret-file", secret_file(self.folder))

    @contextmanager
    def decoding(self) -> Iterator[Serving]:
        """A server that asks it."""
        tiers = {"hbm": "4MiB", "cpu": "8MiB", "remote": self.redis.url, "role": "decode", "prefill_url": self.url}
        with serving(engine={"cache_tiers": tiers}) as server:
            yield server

    def asked(self) -> dict:
        return self.decode.engine.stats()["remote"]["prefill"]

    def reasons(self) -> list[str]:
        return self.decode.get("/health").json()["reasons"]

    def close(self) -> None:
        self.prefill.kill()
        self.redis.kill()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, secret: None) -> Iterator[Pair]:
    found = Pair(tmp_path_factory.mktemp("pair"))
    try:
        with found.decoding() as found.decode:
            yield found
    finally:
        found.close()


@pytest.fixture(scope="module")
def secret() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVSTORE_FLEET_SECRET", SECRET_TEXT)
        yield


def long(topic: str) -> str:
    """Some 200 tokens."""
    return " ".join(f"My {topic} number {index} is called Ada." for index in range(18))


def alone(*talks: list[str]) -> list[list[str]]:
    """Answers of a server that has no other, in these conversations."""
    return answers_without_a_store(list(talks), SHORT["max_tokens"])


def text_of(answer: dict) -> str:
    return answer["message"]["content"]


def remote_tokens(answer: dict) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens_details"]["remote"]


def is_conversation_of_both(pair, number: int) -> bool:
    """Whether the other server has answered in time, which on a busy machine it may not."""
    before = pair.asked()
    wait_until(lambda: pair.reasons() == [], "it answers")
    said = [long(f"dog {number}"), "And what is my name?", long(f"cat {number}"), "Who is Ada?"]
    answers = [chat(pair.decode, said[0])]
    answers += [chat(pair.decode, text, answers[0]["session_id"]) for text in said[1:]]
    fish = long(f"fish {number}")
    reply = pair.decode.post("/v1/chat/completions", {"messages": [{"role": "user", "content": fish}], **SHORT}).json()
    texts = [text_of(one) for one in answers], [reply["choices"][0]["message"]["content"]]
    assert list(texts) == alone(said, [fish])
    asked = pair.asked()
    if asked["failures"] != before["failures"]:
        return False
    found = [remote_tokens(one) for one in (*answers, reply)]
    assert found[0] >= 128 and found[2] >= 128 and found[4] >= 128, "computed by the other server"
    assert found[1] == found[3] == 0, "too little to ask for"
    assert (asked["computed"] - before["computed"], asked["waiting"]) == (3, 0)
    assert (asked["blocks"] - before["blocks"]) * 16 >= sum(found) and pair.reasons() == []
    page = pair.decode.get("/metrics").body.decode()
    assert "kvstore:prefill_up 1.0" in page and f"kvstore:prefill_computed_total {asked['computed']}.0" in page
    return True


def test_a_conversation_over_both_says_what_one_server_says(pair):
    numbers = itertools.count()
    wait_until(lambda: is_conversation_of_both(pair, next(numbers)), "in time", 4 * TIMEOUT_S)


def test_a_prefill_server_that_ends_in_the_middle_costs_time_alone(pair):
    """It is stopped, killed while a request waits for it, gone, and back."""
    before = pair.asked()["failures"]
    topics = ("car", "bike", "boat", "train", "plane")
    expected = {topic: text for topic, [text] in zip(topics, alone(*([long(one)] for one in topics)), strict=True)}

    def failed(cause: str) -> int:
        return pair.asked()["failures"].get(cause, 0) - before.get(cause, 0)

    pair.prefill.process.send_signal(signal.SIGSTOP)
    assert text_of(chat(pair.decode, long("car"))) == expected["car"]
    assert failed("late") >= 1 and "prefill_degraded" in pair.reasons()
    assert text_of(chat(pair.decode, long("bike"))) == expected["bike"]
    assert failed("down") == 1
    pair.prefill.process.send_signal(signal.SIGCONT)
    wait_until(lambda: pair.reasons() == [], "it is asked again")
    pair.prefill.process.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(chat, pair.decode, long("boat"))
        wait_until(lambda: pair.asked()["waiting"] or running.done(), "it waits")
        pair.prefill.kill()
        assert text_of(running.result()) == expected["boat"]
    assert text_of(chat(pair.decode, long("train"))) == expected["train"]
    assert pair.decode.get("/health").json() == {"status": "degraded", "reasons": ["prefill_degraded"]}
    page = pair.decode.get("/metrics").body.decode()
    assert "kvstore:prefill_up 0.0" in page and 'kvstore:prefill_failures_total{cause="down"}' in page
    pair.prefill = pair.start()
    wait_until(lambda: pair.reasons() == [], "it is found again")
    assert text_of(chat(pair.decode, long("plane"))) == expected["plane"]
    numbers = itertools.count()
    wait_until(lambda: remote_tokens(chat(pair.decode, long(f"plane {next(numbers)}"))) >= 128, "it computes again")


def test_a_shared_tier_that_is_gone_costs_time_alone(pair):
    [[horse], [cow]] = alone([long("horse")], [long("cow")])
    pair.redis.restart()  # empty
    assert text_of(chat(pair.decode, long("horse"))) == horse
    pair.redis.kill()
    assert text_of(chat(pair.decode, long("cow"))) == cow
    pair.redis.start()


def test_a_server_of_another_fleet_is_not_let_in(pair, monkeypatch):
    monkeypatch.setenv("KVSTORE_FLEET_SECRET", SECRET_TEXT[::-1])
    with pair.decoding() as stranger:
        wait_until(lambda: "prefill_degraded" in stranger.get("/health").json()["reasons"], "its first probe")
        assert "401 invalid_api_key" in stranger.engine.stats()["remote"]["prefill"]["degraded"]
        assert [[text_of(chat(stranger, long("pig")))]] == alone([long("pig")])


# -- models that keep states -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("family", "kind"), [("Qwen3_5Text", "objects"), ("GptOss", "redis")])
def test_a_state_comes_from_the_other_server_too(family, kind, saved_model, redis, secret, tmp_path):
    model = saved_model(family, tokenizer=True, max_position_embeddings=1024)
    url = redis.url if kind == "redis" else Directory(tmp_path / "objects").url
    tiers, own = {"hbm": "4MiB", "cpu": "16MiB", "remote": url}, {"device": "cpu", "dtype": "float32"}
    prefills = {"cache_tiers": {**tiers, "role": "prefill"}, **own}
    with ExitStack() as opened:
        opened.enter_context(constants(remote, UNKNOWN_S=TIMEOUT_S, LEAST_S=TIMEOUT_S))
        server = opened.enter_context(serving(model, engine=prefills, fleet_key=fleet_key_of(prefills)))
        role = CacheTiers(**tiers, role="decode", prefill_url=server.url)
        engine, alone = (opened.enter_context(Engine(model, one, **own)) for one in (role, CacheTiers("4MiB")))
        history = PROMPT
        for number in range(3):
            expected, output = (one.generate([history], greedy(20))[0] for one in (alone, engine))
            assert output.token_ids == expected.token_ids
            assert len(history) - output.usage.cached_tokens <= 16, "the rest of its last block"
            history = [*history, *output.token_ids, *tokens(number, 150)]
        asked = engine.stats()["remote"]["prefill"]
        assert (asked["computed"], asked["failures"]) == (3, {})
        engine.check_integrity()


# -- POST /prefill ---------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.resume()
    server.kill()


@pytest.fixture(scope="module")
def server(redis, secret, tmp_path_factory):
    """With a disk, which the one above has not."""
    tiers = {"hbm": "8MiB", "cpu": "8MiB", "remote": redis.url, "role": "prefill"}
    tiers |= {"disk": "32MiB", "path": tmp_path_factory.mktemp("store")}
    with serving(engine={"cache_tiers": tiers}, fleet_key=fleet_key_of({"cache_tiers": tiers}), api_key=KEY) as found:
        yield found


def ask(server, key=None, **more):
    body = {
        "token_ids": PROMPT,
        "root": server.engine.facts.root("").hex(),
        "fingerprint": server.engine.facts.fingerprint.hex(),
    }
    key = fleet_secret(None).derived(PREFILL_KEY).hex() if key is None else key
    return server.post("/prefill", {**body, **more}, Authorization=f"Bearer {key}")


def test_a_prompt_is_in_the_shared_tier_when_the_answer_comes(server, redis):
    for length, num_blocks in ((160, 10), (100, 6), (15, 0), (0, 0)):
        redis.ask("FLUSHALL")
        prompt = tokens(length, length)
        reply = ask(server, token_ids=prompt)
        assert (reply.status, reply.json()) == (200, {"num_blocks": num_blocks})
        assert redis.ask("DBSIZE") == num_blocks
    server.wait_until_idle()


def test_a_prompt_that_is_there_is_told_at_once(server, redis):
    assert [ask(server).json()["num_blocks"] for _ in range(2)] == [10, 10]


def test_a_prompt_is_of_the_chain_that_it_names(server):
    root = server.engine.facts.root("ada")
    assert ask(server, root=root.hex(), tenant="ada").json() == {"num_blocks": 10}
    reply = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 1})
    assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] in (0, 144), "only its own"
    output = server.run(server.context.engine.generate(PROMPT, tenant="ada"))
    assert output.usage.cached_tokens == 144


@pytest.mark.parametrize("key", ["", KEY, "ab" * 32])
def test_without_the_fleets_key_nothing_is_computed(server, key):
    reply = ask(server, key)
    assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")


@pytest.mark.parametrize(
    ("wrong", "status", "code"),
    [
        ({"fingerprint": "00" * 32}, 409, "another_model"),
        ({"root": "ab"}, 400, "invalid_value"),
        ({"token_ids": [10**6]}, 400, "invalid_value"),
        ({"token_ids": [1] * 2000}, 400, "context_length_exceeded"),
    ],
)
def test_what_it_cannot_compute_is_refused(server, wrong, status, code):
    reply = ask(server, **wrong)
    assert (reply.status, reply.error["code"]) == (status, code)


def test_without_the_shared_tier_it_says_that_nothing_is_there(server, redis):
    redis.kill()
    assert ask(server, token_ids=tokens(7, 160)).json() == {"num_blocks": 0}
    redis.start()
    server.wait_until(lambda: not server.engine.stats()["remote"]["degraded"], "it is back")


def test_only_a_server_of_that_role_lets_others_in():
    assert fleet_key_of({"cache_tiers": CacheTiers()}) is None and fleet_key_of({}) is None
