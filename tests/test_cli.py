"""The command line and the demonstration, against a fake engine: no model is loaded here."""

import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

import pytest

from engine.outputs import CachedTokensDetails, Choice, Piece, RequestOutput, Usage
from kvstore.errors import ContextLengthError, ModelError
from service import cli, demo, terminal

ROOT = Path(__file__).parent.parent


class FakeSession:
    """Answers with the message in capitals, two pieces a word; its prompt grows by ten tokens a turn."""

    def __init__(self, system):
        self.system = system
        self.last = None
        self.num_turns = 0
        self.closed_early = False

    def stream(self, text, params):
        if text == "too long":
            raise ContextLengthError("the prompt has 2,000 tokens, the window 1,024", 2000, 1024)
        words = text.upper().split(" ")
        try:
            for index, word in enumerate(words):
                yield Piece(0, word + " " * (index < len(words) - 1), (index,))
                if text == "slow answer":
                    os.kill(os.getpid(), signal.SIGINT)
        except GeneratorExit:
            self.closed_early = True
            raise
        self.num_turns += 1
        self.last = make_output(10 * self.num_turns, 10 * (self.num_turns - 1), text.upper())


def make_output(num_prompt, num_cached, text, ttft_s=0.0125):
    usage = Usage(num_prompt, 3, CachedTokensDetails(hbm=num_cached))
    choice = Choice(text=text, token_ids=[1, 2, 3], finish_reason="stop")
    return RequestOutput("request", list(range(num_prompt)), [choice], usage, ttft_s)


class FakeEngine:
    made: ClassVar[list] = []

    def __init__(self, model, **arguments):
        if model == "missing":
            raise ModelError("no model at 'missing': no such directory;\n give a local directory or a hub id")
        self.model, self.arguments = model, arguments
        self.sessions, self.salts = {}, []
        self.model_name, self.max_model_len = model or "builtin", 1024
        FakeEngine.made.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.closed = True

    def chat(self, session_id, tenant="", system=None):
        self.sessions[session_id] = FakeSession(system)
        return self.sessions[session_id]

    def generate(self, prompts, params, tenant="", cache_salt=""):
        self.salts.append(cache_salt)
        return [make_output(len(prompt), 0, "x", ttft_s=0.05) for prompt in prompts]


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the command with the lines on stdin; gives (exit code, stdout, stderr)."""
    for name in [name for name in os.environ if name.startswith("KVSTORE_")]:
        monkeypatch.delenv(name)
    FakeEngine.made.clear()

    def call(*argv, lines=()):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
        code = cli.main(list(argv), FakeEngine)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_help_lists_only_the_commands_that_exist(run):
    code, out, err = run("--help")
    assert (code, err) == (0, "")
    assert "chat" in out and "serve" not in out
    code, out, _ = run("chat", "--help")
    assert code == 0
    for option in cli.ENGINE_OPTIONS + cli.CHAT_OPTIONS:
        assert option.flag in out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["chta"], "'chta'; did you mean 'chat'?"),
        (["--versoin"], "did you mean '--version'?"),
        (["chat", "--max-modl-len", "3"], "did you mean '--max-model-len'?"),
        (["chat", "--zzz=1"], "unknown flag '--zzz'"),
        (["chat", "a", "b"], "'b'"),
        (["chat", "--block-size"], "--block-size"),
        (["chat", "--block-size", "0"], "--block-size is '0'; give a whole number from 1"),
        (["chat", "--seed", "x"], "--seed is 'x'"),
        (["chat", "--hbm", "lots"], '512MiB", "1.5GiB" or "2GB", or "auto"'),
        (["chat", "--hbm", "0"], "hbm is 0"),
        (["chat", "--dtype", "int3"], "auto, float32, bfloat16, float16"),
        (["chat", "--device", "tpu"], "auto, cpu, cuda"),
        (["chat", "--session", "a b"], "--session is 'a b'"),
        (["chat", "--temperature", "nan"], "temperature is nan"),
        (["chat", "--temperature", "hot"], "--temperature is 'hot'; give a number"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(run, argv, words):
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert words in err and err.startswith("kvstore: ") and err.count("\n") == 1
    assert FakeEngine.made == []


def test_flags_reach_the_engine_and_win_over_the_environment(run, monkeypatch):
    monkeypatch.setenv("KVSTORE_BLOCK_SIZE", "32")
    monkeypatch.setenv("KVSTORE_MAX_MODEL_LEN", "512")
    monkeypatch.setenv("KVSTORE_SYSTEM", "be brief")
    code, _, _ = run("chat", "some/model", "--max-model-len", "256", "--hbm=1.5GiB", "--seed", "-1")
    made = FakeEngine.made[0]
    assert code == 0 and made.model == "some/model" and made.closed
    tiers = made.arguments.pop("cache_tiers")
    assert (tiers.hbm, tiers.cpu, tiers.disk) == (1536 * 1024**2, 0, 0)
    assert made.arguments == {
        "max_model_len": 256,
        "block_size": 32,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "dtype": "auto",
        "device": "auto",
        "seed": -1,
    }
    assert made.sessions["terminal"].system == "be brief"


def test_a_wrong_environment_value_names_the_variable(run, monkeypatch):
    monkeypatch.setenv("KVSTORE_MAX_NUM_SEQS", "many")
    code, _, err = run("chat")
    assert code == 2 and "KVSTORE_MAX_NUM_SEQS is 'many'" in err


def test_a_model_that_does_not_load_is_one_line_and_exit_1(run):
    code, _, err = run("chat", "missing")
    assert code == 1
    assert err.splitlines()[-1].startswith("kvstore: no model at 'missing'") and "Traceback" not in err


def test_piped_chat_streams_and_shows_what_each_turn_cost(run):
    code, out, err = run("chat", lines=["hello there", "", "[red]again[/red] \x1b[31m"])
    assert code == 0 and "loading the built-in model" in err
    assert "model> HELLO THERE\n[prompt 10 tokens · cached 0 · computed 10 · TTFT 12 ms" in out
    assert "model> [RED]AGAIN[/RED] [31M\n[prompt 20 tokens · cached 10 · computed 10 · TTFT 12 ms" in out
    assert "\x1b" not in out


def test_chat_commands(run):
    code, out, _ = run("chat", "--session", "s", lines=["/help", "a", "/new", "b", "/nwe", "/quit", "never"])
    assert code == 0 and "/new   start a new conversation" in out
    assert "unknown command /nwe" in out and "NEVER" not in out
    assert {name: session.num_turns for name, session in FakeEngine.made[0].sessions.items()} == {"s": 1, "s-2": 1}


def test_a_refused_message_does_not_end_the_chat(run):
    code, out, err = run("chat", lines=["too long", "fine"])
    assert code == 1 and "2,000 tokens" in err and "FINE" in out


def test_ctrl_c_stops_the_answer_only(run):
    code, out, _ = run("chat", lines=["slow answer", "next"])
    assert code == 0 and "SLOW" in out and "[stopped]" in out and "NEXT" in out
    assert FakeEngine.made[0].sessions["terminal"].closed_early


def test_ctrl_c_elsewhere_is_130(run, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(terminal, "run_chat", interrupted)
    code, _, err = run("chat")
    assert (code, err) == (130, "kvstore: interrupted\n")


def test_summary_of_a_turn_without_first_token():
    output = make_output(1, 0, "", ttft_s=None)
    assert terminal.turn_summary(output, 1.0) == "[prompt 1 tokens · cached 0 · computed 1]"


def command(*argv, **kwargs):
    return subprocess.run(
        [sys.executable, "-m", "service.cli", *argv], cwd=ROOT, capture_output=True, text=True, timeout=60, **kwargs
    )


def test_version():
    done = command("--version")
    assert done.returncode == 0 and re.match(r"kvstore \S", done.stdout)


def test_the_reader_may_go_away():
    script = f"{sys.executable} -m service.cli chat --help | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stderr == "" and done.stdout.strip() in ("0", "1")


def test_start_up_takes_less_than_150_ms():
    times = []
    for _ in range(5):
        start = time.perf_counter()
        assert command("--help").returncode == 0
        times.append(time.perf_counter() - start)
    assert min(times) < 0.15, times


def test_demo_measures_every_turn_warm_and_cold(capsys, tmp_path):
    FakeEngine.made.clear()
    file = tmp_path / "demo.json"
    assert demo.main(["--json", str(file)], FakeEngine) == 0
    out = capsys.readouterr().out
    assert "cold / warm" in out and "4.0x" in out and "DOOR CODE" in out
    salts = FakeEngine.made[0].salts
    assert len(set(salts)) == len(salts) == 1 + len(demo.SCRIPT)
    assert '"cold_ttft_s": 0.05' in file.read_text()


def test_demo_says_why_a_model_does_not_load(capsys):
    assert demo.main(["--model", "missing"], FakeEngine) == 1
    assert "kvstore: no model at 'missing'" in capsys.readouterr().err
