"""What authors recommend in generation_config.json, as families ship it, reaches every route in both modes."""

import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore import Engine, SamplingParams
from kvstore.engine.client.messages import Opened, decode_outbound
from kvstore.engine.model.loading import load
from kvstore.engine.process import encode
from kvstore.service.command.terminal import run_chat
from kvstore.service.settings.engine_options import ChatOptions
from tests.support.engines import save_model
from tests.support.service.serving import Serving, serving
from tests.support.typing_in import type_in

SHIPPED = {
    "Qwen2.5": {
        "bos_token_id": 151643, "pad_token_id": 151643, "do_sample": True, "eos_token_id": [151645, 151643],
        "repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20,
    },
    "Gemma3": {
        "bos_token_id": 2, "cache_implementation": "hybrid", "do_sample": True, "eos_token_id": [1, 106],
        "pad_token_id": 0, "top_k": 64, "top_p": 0.95,
    },
    "Phi3": {
        "_from_model_config": True, "bos_token_id": 1, "eos_token_id": [32000, 32001, 32007], "pad_token_id": 32000,
    },
    "whole numbers": {"do_sample": True, "temperature": 1, "top_p": 1, "top_k": 5, "repetition_penalty": 1},
}  # fmt: skip
EXPECTED = {
    "Qwen2.5": {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
    "Gemma3": {"top_p": 0.95, "top_k": 64},
    "Phi3": {},
    "whole numbers": {"temperature": 1, "top_p": 1, "top_k": 5, "repetition_penalty": 1},
}
SAID = [{"role": "user", "content": "Hello"}]
BODIES = {
    "/chat": {"message": "Hello", "max_tokens": 3},
    "/v1/chat/completions": {"messages": SAID, "max_tokens": 3},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 3},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 3},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_model(tmp_path_factory.mktemp("model") / "m", tokenizer=True)


def ship(model: str, family: str) -> dict[str, float]:
    """What the loaded model says then."""
    (Path(model) / "generation_config.json").write_text(json.dumps(SHIPPED[family]))
    return load(model, "cpu", "auto", None).sampling_defaults


@pytest.mark.parametrize("family", SHIPPED)
def test_the_authors_defaults_are_read(model, family):
    found = ship(model, family)
    assert kinds(found) == kinds(EXPECTED[family])
    SamplingParams(**found)


def kinds(defaults):
    """1 and 1.0 are two things here."""
    return {name: (type(value), value) for name, value in defaults.items()}


@pytest.mark.parametrize("process", ["here", "own"])
def test_every_route_answers_with_every_familys_defaults(model, process):
    ship(model, "Qwen2.5")
    with serving(engine_factory=lambda: Engine(model, {"hbm": "4MiB"}, device="cpu", process=process)) as server:
        assert kinds(server.engine.facts.sampling_defaults) == kinds(EXPECTED["Qwen2.5"])  # as they really came
        for family in SHIPPED:
            become(server, ship(model, family))
            assert kinds(server.engine.facts.sampling_defaults) == kinds(EXPECTED[family])
            for path, body in BODIES.items():
                reply = server.post(path, body)
                assert reply.status == 200, (family, path, reply.body)
        server.wait_until_idle()


def become(server: Serving, defaults: dict[str, float]) -> None:
    """The engine's process is started for one family only: what it would say for another goes the same way."""
    facts = replace(server.engine.facts, sampling_defaults=defaults)
    server.engine.facts = decode_outbound(encode(Opened(facts))).facts


def test_the_terminal_answers_beside_the_defaults_of_qwen(model, monkeypatch, capsys):
    ship(model, "Qwen2.5")
    type_in(monkeypatch, "Hello")
    arguments = {"cache_tiers": {"hbm": "4MiB"}, "device": "cpu"}
    with warnings.catch_warnings():  # what shows them is taken over
        assert run_chat(model, arguments, ChatOptions(0.0, 3, None, "terminal")) == 0
    assert "stopped at the token limit" in capsys.readouterr().out
