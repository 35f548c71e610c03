"""Texts of any length: few long ones are tokenized at once, what cannot fit waits for nothing, bodies do not stay."""

import asyncio
import gc
import json
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvstore import Engine
from kvstore.engine import async_engine
from kvstore.engine.async_engine import LONG_TEXT_CHARS, MAX_LONG_TEXTS, AsyncEngine
from kvstore.engine.model.loading import load
from kvstore.engine.sessions.chat import ChatSession
from kvstore.engine.sessions.recall import Recall
from kvstore.engine.text.chat_template import ChatTemplate
from kvstore.engine.text.prompts import prompt_ids
from kvstore.service.api import edge
from tests.support.by_hand import held
from tests.support.engines import save_model
from tests.support.service.serving import serving
from tests.support.waiting import TIMEOUT_S, wait_in_loop

WINDOW = 16384  # fewer than the text has tokens, more than can be told from its length
MODEL = {"tokenizer": True, "max_position_embeddings": WINDOW}
TEXT = ("how are you today, and who is there with you? " * 4000)[: LONG_TEXT_CHARS + 20_000]
USER = [{"role": "user", "content": TEXT}]
ROUTES = {
    "/tokenize": {"prompt": TEXT},
    "/tokenize of messages": {"messages": USER},
    "/detokenize": {"tokens": [300] * (LONG_TEXT_CHARS + 1)},
    "/v1/completions": {"prompt": TEXT, "max_tokens": 1},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 1},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 1},
    "/v1/responses, not stored": {"input": TEXT, "max_output_tokens": 1, "store": False},
    "/chat": {"message": TEXT, "max_tokens": 1},
    "/chat with a system prompt": {"message": "Hello", "system": TEXT, "max_tokens": 1},
}
TOKENIZING = (
    (edge, "_encode"), (edge, "_chat_ids"), (edge, "_detokenized"), (async_engine, "prompt_ids"),
    (Recall, "prompt_ids"), (ChatSession, "check"), (ChatSession, "begin"), (ChatTemplate, "prompt_ids"),
)  # fmt: skip


@pytest.fixture(scope="module")
def wide(model):
    with serving(model, engine={"cache_tiers": {"hbm": "32MiB"}}) as found:
        yield found


class Crowd:
    """Threads in the functions it watches. most: how many there were at once."""

    def __init__(self) -> None:
        self.most = 0
        self._inside: dict[int, int] = {}
        self._lock = threading.Lock()

    def watched(self, function):
        def call(*arguments, **named):
            if isinstance(arguments[0], list):  # a prompt that is ids already
                return function(*arguments, **named)
            me = threading.get_ident()
            with self._lock:
                self._inside[me] = self._inside.get(me, 0) + 1
                self.most = max(self.most, len(self._inside))
            try:
                return function(*arguments, **named)
            finally:
                with self._lock:
                    self._inside[me] -= 1
                    if not self._inside[me]:
                        del self._inside[me]

        return call


@pytest.mark.parametrize("route", ROUTES)
def test_few_long_texts_are_tokenized_at_once(wide, monkeypatch, route):
    crowd = Crowd()
    for owner, name in TOKENIZING:
        monkeypatch.setattr(owner, name, crowd.watched(getattr(owner, name)))
    path, body = route.partition(" ")[0].rstrip(","), json.dumps(ROUTES[route]).encode()
    num_clients = MAX_LONG_TEXTS + 2
    with ThreadPoolExecutor(num_clients) as clients:
        replies = list(clients.map(lambda _: wide.post(path, body), range(num_clients)))
    assert {reply.status for reply in replies} == ({200} if "token" in path else {400}), replies[0].body
    assert 1 <= crowd.most <= MAX_LONG_TEXTS
    wide.wait_until_idle()


def test_a_long_text_that_nobody_waits_for_any_more_is_not_tokenized(model, monkeypatch):
    begun, may_go_on = [], threading.Event()

    def waiting(*arguments):
        begun.append(threading.get_ident())
        may_go_on.wait(TIMEOUT_S)
        return prompt_ids(*arguments)

    async def scenario() -> None:
        async with AsyncEngine(Engine(model, {"hbm": "32MiB"}, device="cpu")) as found:
            callers = [asyncio.create_task(found.generate(TEXT)) for _ in range(8)]
            await wait_in_loop(lambda: len(begun) == MAX_LONG_TEXTS)
            for caller in callers:
                caller.cancel()
            await asyncio.gather(*callers, return_exceptions=True)
            may_go_on.set()
            await found.call_with_text(len(TEXT), lambda: None)  # whatever stood before it has had its thread

    monkeypatch.setattr(async_engine, "prompt_ids", waiting)
    asyncio.run(scenario())
    assert len(begun) == MAX_LONG_TEXTS


def test_tokens_of_a_long_text_are_the_tokenizers(wide):
    found = wide.post("/tokenize", {"prompt": TEXT, "return_token_strs": True}).json()
    tokenizer = wide.engine.tokenizer
    assert found["tokens"] == tokenizer(TEXT)["input_ids"]
    assert found["token_strs"] == tokenizer.convert_ids_to_tokens(found["tokens"])
    assert wide.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": tokenizer.decode(found["tokens"])}


def test_a_tokenizer_whose_file_cuts_texts_does_not(model, tmp_path):
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.backend_tokenizer.enable_truncation(4)
    folder = Path(save_model(tmp_path / "m", vocab_size=2048))
    tokenizer.save_pretrained(folder)
    ids = ChatTemplate.of(load(folder, "cpu", "auto", None).tokenizer).prompt_ids(USER)
    assert len(ids) > 1000


# -- where there is no place, or no step ------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def resting():
    with serving() as found, held(found.engine):
        yield found


@pytest.mark.parametrize("route", [route for route in ROUTES if "token" not in route])
def test_what_cannot_fit_waits_for_nothing_and_is_not_tokenized(resting, route, monkeypatch):
    def encoded(*_):
        raise AssertionError("a text that cannot fit was tokenized")

    monkeypatch.setattr("kvstore.engine.text.chat_template._ids", encoded)
    reply = resting.post(route.partition(" ")[0].rstrip(","), ROUTES[route])
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")


def test_ids_that_cannot_fit_wait_for_nothing(resting):
    for prompt in ([300] * 1024, [[300], [300] * 1024]):
        reply = resting.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
        assert (reply.status, reply.error["param"]) == (400, "prompt")


def test_a_body_does_not_stay_while_its_request_waits():
    with serving() as server:
        limits = server.context.limits
        body = json.dumps({"prompt": "Hello", "max_tokens": 1, "note": "x" * 2**22}).encode()
        tracemalloc.start()
        try:
            with ThreadPoolExecutor(6) as clients, held(server.engine):
                replies = [clients.submit(server.post, "/v1/completions", body) for _ in range(6)]
                server.wait_until(lambda: limits.num_admitted == 6, "all wait")
                num_bytes, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert {reply.result().status for reply in replies} == {200}
        assert num_bytes < 2 * len(body)  # and not six


@pytest.mark.parametrize("route", [route for route in ROUTES if "token" not in route])
def test_a_text_that_was_refused_does_not_stay(resting, route):
    path, body = route.partition(" ")[0].rstrip(","), json.dumps(ROUTES[route]).replace(TEXT, "a" * 2**21).encode()
    resting.post(path, body)
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        for _ in range(4):
            assert resting.post(path, body).status == 400
        resting.wait_until(lambda: resting.context.limits.num_open == 0, "they are over")
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.enable()
    assert num_bytes < len(body)
