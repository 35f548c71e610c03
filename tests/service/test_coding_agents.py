"""Coding agents as npm installs them, unchanged, each with an empty home: two turns, a kill of the server, a third."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

from kvstore.engine.builtin import MODEL_DIR
from tests.support.engines import save_model
from tests.support.redis_server import free_port
from tests.support.service.server_process import ServerProcess, launched
from tests.support.service.serving import KEY

pytestmark = pytest.mark.agents
SIZES = ("--hbm", "32MiB", "--cpu", "64MiB", "--disk", "512MiB", "--served-model-name", "kvstore")
WINDOW = 32768
MOST_COMPUTED = 0.02  # of a later turn's prompt

CODEX = """
model = "kvstore"
model_provider = "kvstore"
[model_providers.kvstore]
name = "kvstore"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "KVSTORE_API_KEY"
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """It talks at random, and the agents set no limit: a sixteenth of its tokens end an answer. Its vocabulary is of
    prose: Claude Code's prompt has 42,000 of the built-in model's tokens, and 26,000 of these.
    """
    folder = tmp_path_factory.mktemp("model")
    size = save_tokenizer_of_prose(folder)
    return save_model(
        folder, vocab_size=size, max_position_embeddings=WINDOW, num_hidden_layers=1,
        eos_token_id=[5, *range(300, size, 16)],
    )  # fmt: skip


def save_tokenizer_of_prose(folder: Path) -> int:
    """Bytes and what the manual of Python is made of, with the built-in model's controls and chat template."""
    import tokenizers
    import transformers

    known = transformers.AutoTokenizer.from_pretrained(MODEL_DIR)
    controls = [token.content for token in known.added_tokens_decoder.values()]
    backend, level = tokenizers.Tokenizer(tokenizers.models.BPE()), tokenizers.pre_tokenizers.ByteLevel
    backend.pre_tokenizer, backend.decoder = level(add_prefix_space=False), tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=2**14, special_tokens=controls, initial_alphabet=level.alphabet(), show_progress=False
    )
    backend.train_from_iterator(topics.values(), trainer)
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=known.eos_token, chat_template=known.chat_template
    )
    made.save_pretrained(folder)
    return len(made)


def opencode(url: str) -> str:
    options = {"baseURL": f"{url}/v1", "apiKey": "{env:KVSTORE_API_KEY}"}
    models = {"kvstore": {"name": "kvstore", "limit": {"context": WINDOW, "output": 4096}}}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "kvstore", "options": options, "models": models}
    return json.dumps({"model": "kvstore/kvstore", "autoupdate": False, "provider": {"kvstore": provider}})


@dataclass(frozen=True)
class Agent:
    """file, settings: in its home, by the server's URL. first, then: the arguments of a first and of a later turn.
    environment: beside its home and the key, by the URL.
    """

    command: str
    file: str
    settings: Callable[[str], str]
    first: Sequence[str]
    then: Sequence[str]
    environment: Callable[[str], Mapping[str, str]] = lambda url: {}

    def say(self, words: str, home: Path, url: str, is_first: bool) -> None:
        """One turn. Raises where it fails."""
        program = shutil.which(self.command)
        assert program is not None
        settings, work = home / self.file, home / "work"
        for folder in (settings.parent, work):
            folder.mkdir(parents=True, exist_ok=True)
        settings.write_text(self.settings(url))
        environment = {"PATH": os.environ["PATH"], "HOME": str(home), "KVSTORE_API_KEY": KEY, **self.environment(url)}
        asked = [program, *(self.first if is_first else self.then), words]
        done = subprocess.run(
            asked, cwd=work, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def claude(url: str) -> str:
    told = {
        "ANTHROPIC_BASE_URL": url, "ANTHROPIC_MODEL": "kvstore", "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(WINDOW),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_TELEMETRY": "1",
    }  # fmt: skip
    return json.dumps({"env": told})


AGENTS = (
    Agent("claude", ".claude/settings.json", claude, ("-p",), ("-p", "-c"), lambda url: {"ANTHROPIC_AUTH_TOKEN": KEY}),
    Agent(
        "codex", ".codex/config.toml", lambda url: CODEX.format(url=url), ("exec", "--skip-git-repo-check"),
        ("exec", "resume", "--last", "--skip-git-repo-check"),
    ),
    Agent(
        "opencode", ".config/opencode/opencode.json", opencode, ("run",), ("run", "-c"),
        lambda url: {"OPENCODE_DISABLE_MODELS_FETCH": "1"},
    ),
)  # fmt: skip


def requests_of(server: ServerProcess, after: int = 0) -> list[dict[str, Any]]:
    """What the log says of requests for answers, without the first ones."""
    lines = map(json.loads, server.log.read_text().splitlines())
    return [one for one in lines if one["message"] == "request" and "/v1/" in one["route"]][after:]


def check_hits(turn: Sequence[Mapping[str, Any]]) -> None:
    """All requests of a turn were answered, and the largest prompt, the conversation, was hardly computed."""
    assert turn and {one["status"] for one in turn} == {200}, turn
    largest = max(turn, key=lambda one: one["prompt_tokens"])
    num_computed = largest["prompt_tokens"] - largest["cached_tokens"]
    assert num_computed <= MOST_COMPUTED * largest["prompt_tokens"], largest


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.command)
def test_later_turns_hit_what_came_before_also_after_a_kill(agent: Agent, model: str, tmp_path: Path) -> None:
    if shutil.which(agent.command) is None:
        pytest.skip(f"{agent.command} is not installed")
    port, store, home = free_port(), tmp_path / "store", tmp_path / "home"
    url, flags = f"http://127.0.0.1:{port}", (model, *SIZES, "--port", str(port))
    with launched(store, *flags) as server:
        agent.say("hi", home, url, is_first=True)
        first = requests_of(server)
        assert first and {one["status"] for one in first} == {200}, first
        agent.say("and you?", home, url, is_first=False)
        check_hits(requests_of(server, len(first)))
        server.flush()
        num_known = len(requests_of(server))
        server.kill()
    with launched(store, *flags) as server:
        agent.say("still there?", home, url, is_first=False)
        check_hits(requests_of(server, num_known))
