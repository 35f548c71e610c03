"""Coding agents as they are installed, run against a server of a random model whose window holds their prompts.

The model's vocabulary is made here: the built-in one would take twice as many tokens. It ends an answer at one token in
eight, so that an agent whose request has no bound gets a short one.
"""

import json
import os
import pydoc_data.topics
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvstore.engine.builtin import MODEL_DIR
from tests.support.engines import save_model
from tests.support.service.server_process import ServerProcess

WINDOW = 32_768
VOCAB = 16_384
SIZES = ("--hbm", "64MiB", "--cpu", "128MiB", "--disk", "1GiB", "--served-model-name", "random")
RUN_S = 300.0


def save_agents_model(folder: Path) -> str:
    """The folder of a model with this window, the built-in one's chat template, and a vocabulary for prose."""
    import tokenizers
    import transformers

    controls = ["<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=controls, show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    made.train_from_iterator(pydoc_data.topics.topics.values(), trainer)
    template = (MODEL_DIR / "chat_template.jinja").read_text()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<|bos|>", eos_token="<|end|>", chat_template=template
    )
    fast.save_pretrained(folder)
    path = save_model(folder, vocab_size=len(fast), max_position_embeddings=WINDOW, eos_token_id=1)
    ends = [1, *range(len(controls), len(fast), 8)]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return path


def installed(name: str) -> str | None:
    """The path of an agent's command, which may be in a folder of $KVSTORE_TEST_AGENTS; None if it is not there."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("KVSTORE_TEST_AGENTS", ""), os.environ["PATH"]]))


def run_agent(home: Path, command: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """One run of an agent to its end, in a home of its own and an empty working directory in it."""
    work = home / "work"
    work.mkdir(parents=True, exist_ok=True)
    given = {"PATH": os.environ["PATH"], "HOME": str(home), **environment}
    return subprocess.run(
        command, cwd=work, env=given, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=RUN_S
    )


def requests_in(server: ServerProcess, start: int = 0) -> list[Mapping[str, object]]:
    """The log's lines of requests, from this one on."""
    lines = [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]
    return [line for line in lines if line.get("event") == "request" or "route" in line][start:]
