"""The command line, against a fake engine: no model is loaded here."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import redirect_stdout, suppress
from pathlib import Path

import pytest

from kvstore.disk.directory import StoreDirectory
from kvstore.engine.outputs import CachedTokensDetails, Usage
from kvstore.errors import ModelError
from kvstore.service.command import terminal
from kvstore.service.command.cli import command_of
from kvstore.service.settings.config_file import told as told_by
from kvstore.service.settings.engine_options import ChatOptions, arguments_of, engine_command, with_tiers
from kvstore.service.settings.options import COMMANDS
from tests.support.flags_page import flags_page
from tests.support.service.fake_engine import FakeEngine, make_output
from tests.support.service.server_process import run_command, without_progress
from tests.support.shared_sessions import SECRET_TEXT as SECRET
from tests.support.typing_in import type_in

ROOT = Path(__file__).parents[3]


@pytest.fixture
def run(run, chat_opens, monkeypatch):
    """With the lines on stdin."""
    FakeEngine.made.clear()
    FakeEngine.stored = {}
    chat_opens(FakeEngine)

    def call(*argv, lines=()):
        type_in(monkeypatch, *lines)
        return run(*argv)

    return call


def test_python_that_strips_docstrings_is_one_line():
    done = run_command("chat", "--disk", "0", input="", PYTHONOPTIMIZE="2")
    _, error = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "") and "PYTHONOPTIMIZE=2 (-OO)" in error


@pytest.mark.parametrize(("closed", "told"), [("<&-", (False, True)), (">&-", (False, True)), ("2>&-", (False, False))])
def test_a_closed_stream_is_as_good_as_the_null_device(tmp_path, closed, told):
    """A file that is opened next must not take its place, and a child inherits it."""
    command = f"exec {sys.executable} -m kvstore stats --store {tmp_path} {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1 and (bool(done.stdout), "there is no store" in done.stderr) == told
    looks = (
        "import os; from kvstore import __main__; __main__.open_closed_streams(); os.system('readlink /proc/self/fd/2')"
    )
    done = subprocess.run(
        ["sh", "-c", f'{sys.executable} -c "{looks}" {closed}'], capture_output=True, text=True, cwd=ROOT
    )
    assert (done.stdout == "/dev/null\n") == (closed == "2>&-")


class Closed(io.StringIO):
    """A pipe whose reader goes away at the first piece of an answer."""

    def write(self, text):
        if "HELLO" in text:
            raise BrokenPipeError
        return super().write(text)


def test_a_turn_ends_before_the_engine_when_nobody_reads_any_more(no_settings, chat_opens, monkeypatch):
    """Else the turn is ended when its stream is collected: after the engine, with a traceback."""
    type_in(monkeypatch, "hello there")
    ended_first = []

    class Watched(FakeEngine):
        def __exit__(self, *exc):
            ended_first.append(self.sessions["s"].closed_early)

    chat_opens(Watched)
    with redirect_stdout(Closed()), suppress(BrokenPipeError):
        terminal.run_chat(None, {}, ChatOptions(session="s"))
    assert ended_first == [True]


def test_the_version_and_a_help_that_lists_only_the_commands_that_exist(run):
    assert re.match(r"kvstore \S", run("--version")[1])
    code, out, err = run("--help")
    assert (code, err) == (0, "")
    assert re.findall(r"(?m)^  ([a-z-]+) ", out) == list(COMMANDS)


@pytest.mark.parametrize("command", [command_of(name)[1] for name in COMMANDS], ids=lambda command: command.name)
def test_help_of_a_command_shows_every_flag_and_examples(run, command):
    code, out, _ = run(command.name, "--help")
    assert run("help", command.name)[1] == out
    takes = f"{command.takes} " if command.takes else ""
    assert code == 0 and f"usage: kvstore {command.name} {takes}[FLAGS]" in out
    assert f"examples:\n  kvstore {command.name}" in out
    for option in command.options:
        assert option.flag in out
        assert not any(alias in out for alias in option.aliases)


def test_the_page_of_all_flags_is_current():
    found = (ROOT / "docs" / "flags.md").read_text()
    assert found == flags_page(), "write it anew: python -m tests.support.flags_page > docs/flags.md"
    for command in (command_of(name)[1] for name in COMMANDS):
        assert all(f"| `{option.flag}" in found for option in command.options)


REMOTE = ("--cpu", "8MiB", "--remote", "redis://a")
SHARED = ("--session-store", "redis://127.0.0.1:1/0")


@pytest.mark.parametrize(("argv", "words"), [
    (["chta"], "'chta'; did you mean 'chat'?"),
    (["serve", "--hlep"], "did you mean '--help'?"),
    (["serve", "--bogus"], "unknown flag '--bogus'; --help lists all"),
    (["serve", "--port", "99999"], "--port is '99999'"),
    (["chat", "--policy", "fcfs"], "--policy is 'fcfs'; give one of auto, fifo, lru, return"),
    (["chat", "--ttl", "7"], "--ttl is '7'; give a number with a unit, such as 90s, 15m, 2h, 7d or 2w, or \"none"),
    (["chat", "--ttl", "0s"], "give a time above 0"),
    (["chat", "--tokenizer", " "], "--tokenizer is ' '"),
    (["chat", "--max-modl-len", "3"], "did you mean '--max-model-len'?"),
    (["chat", "a", "b"], "'b'"),
    (["chat", "--block-size"], "--block-size"),
    (["chat", "--block-size", "0"], "--block-size is '0'; give a whole number from 1"),
    (["chat", "--hbm", "lots"], '512MiB", "1.5GiB" or "2GB", or "auto"'),
    (["chat", "--hbm", "0"], "hbm is 0"),
    (["chat", "--session", "a b"], "--session is 'a b'"),
    (["chat", "--temperature", "nan"], "--temperature is 'nan'; give a number from 0 to 100"),
    (
        ["chat", "--disk", "auto"],
        "--disk is 'auto'; give a number of bytes, or a number with a unit such as \"512MiB\"",
    ),
    (["serve", "--data-parallel-size", "65"], "--data-parallel-size is '65'; give a whole number from 1 to 64"),
    (["serve", "--data-parallel-size", "2", "--replicas", "2"], "--replicas starts whole servers"),
    (["chat", "--data-parallel-size", "2"], "--data-parallel-size"),
    (["serve", "--role", "prefill"], "--remote is not set, but KV goes over it from or to a server whose role is pref"),
    (["serve", "--role", "decode", "--prefill-url", "http://a:1"], "to a server whose role is decode; give its URL"),
    (["serve", "--role", "decode", *REMOTE], "--prefill-url is not set, but role is decode; give"),
    (["serve", "--prefill-url", "http://a:1", *REMOTE], "--prefill-url is set, but role is not decode"),
    (["serve", "--prefill-url", "a:1", "--role", "decode", *REMOTE], "--prefill-url is 'a:1'; give http://"),
    (["serve", "--replicas", "1-2"], "--replicas 2 without --session-store: a session would be on one replica alone"),
    (["serve", "--replicas", "2", *SHARED, "--distributed-executor", "ray"], "ray, which starts one server"),
])  # fmt: skip
def test_wrong_usage_is_one_line_and_exit_2(run, monkeypatch, argv, words):
    monkeypatch.setenv("KVSTORE_FLEET_SECRET", SECRET)
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
        "eviction": "auto",
        "seed": -1,
        "policy": "fcfs",
        "load": "auto",
        "enforce_eager": False,
        "session_durability": "always",
        "state_dtype": "auto",
        "state_share": 0.5,
        "distributed_executor": "here",
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
    }
    assert made.sessions["terminal"].messages == [{"role": "system", "content": "be brief"}]


@pytest.mark.parametrize(("flags", "expected"), [
    ([], (0, 0, None)),
    (["--store", "/s"], (1 << 30, 8 << 30, "/s")),
    (["--store", "/s", "--disk", "2GiB"], (1 << 30, 2 << 30, "/s")),
    (["--store", "/s", "--disk", "0"], (0, 0, "/s")),
    (["--store", "/s", "--cpu", "0"], (0, 8 << 30, "/s")),
    (["--disk", "1e9", "--cpu", "64MiB"], (64 << 20, 10**9, "HOME/.local/share/kvstore")),
    (["--cpu", "64MiB"], (64 << 20, 0, None)),
])  # fmt: skip
def test_tiers_from_flags(run, flags, expected):
    assert run("chat", *flags)[0] == 0
    tiers = FakeEngine.made[0].arguments["cache_tiers"]
    path = None if tiers.path is None else str(tiers.path).replace(os.path.expanduser("~"), "HOME")
    assert (tiers.cpu, tiers.disk, path) == expected


def test_truncation_flags_reach_the_session(run):
    run("chat")
    assert FakeEngine.made[0].truncation == ("auto", "reencode")
    run("chat", "--truncation", "disabled", "--truncation-reuse=exact")
    assert FakeEngine.made[1].truncation == ("disabled", "exact")


def test_a_wrong_environment_value_names_the_variable(run, monkeypatch):
    monkeypatch.setenv("KVSTORE_MAX_NUM_SEQS", "many")
    code, _, err = run("chat")
    assert code == 2 and "KVSTORE_MAX_NUM_SEQS is 'many'" in err
    monkeypatch.setenv("KVSTORE_MAX_NUM_SEQS", "5000")
    code, _, err = run("chat")
    assert code == 2 and "KVSTORE_MAX_NUM_SEQS is '5000'; give a whole number from 1 to 4096" in err


@pytest.mark.parametrize("remote, words", [
    ("s3://bucket", "s3://, which needs obstore; pip install obstore"),
    ("https://bucket", "remote is 'https://bucket'; give redis://host:6379/0, several with commas between, s3://"),
    ("redis://ann:s3cret@host", "has a password in it"), ("s3://ann:s3cret@bucket", "has credentials in it"),
])  # fmt: skip
def test_a_remote_tier_that_cannot_be_is_one_line_and_exit_2(run, monkeypatch, remote, words):
    monkeypatch.setenv("KVSTORE_FLEET_SECRET", SECRET)
    monkeypatch.setitem(sys.modules, "obstore", None)  # as where it is not installed
    code, out, err = run("chat", "--cpu", "64MiB", "--remote", remote)
    assert (code, out) == (2, "")
    assert words in err and "s3cret" not in err and err.startswith("kvstore: ") and err.count("\n") == 1


def test_a_model_that_does_not_load_is_one_line_and_exit_2(run):
    code, _, err = run("chat", "missing")
    assert code == 2
    assert err.splitlines()[-1].startswith("kvstore: no model at 'missing'") and "Traceback" not in err


def test_piped_chat_streams_and_shows_what_each_turn_cost(run):
    code, out, err = run("chat", lines=["hello there", "", "[red]again[/red] \x1b[31m"])
    assert code == 0 and "loading the built-in model" in err
    assert "model> HELLO THERE\n[prompt 10 tokens · cached 0 · computed 10 · TTFT 12 ms" in out
    assert "model> [RED]AGAIN[/RED] [31M\n[prompt 20 tokens · cached 10 (hbm 10) · computed 10 · TTFT 12 ms" in out
    assert "\x1b" not in out


def test_chat_commands(run):
    code, out, err = run("chat", "--session", "s", lines=["/help", "a", "/new", "b", "/nwe", "/quit", "never"])
    assert code == 1 and "kvstore: unknown command /nwe; did you mean '/new'?" in err and "NEVER" not in out
    for name in (*terminal.COMMANDS, terminal.QUIT):
        assert f"\n{name} " in out
    assert turns_of_sessions() == {"s": 1, "s-2": 1}


def turns_of_sessions():
    return {name: session.num_turns for name, session in FakeEngine.made[0].sessions.items()}


def test_what_goes_back_goes_on_in_a_fork(run):
    FakeEngine.stored = {"s-2": exchange(1)}
    code, out, err = run("chat", "--session", "s", lines=["a", "b", "/undo", "c", "/retry", "/undo", "/undo", "/undo"])
    assert turns_of_sessions() == {"s": 2, "s-3": 2, "s-4": 2, "s-5": 1, "s-6": 0}
    assert out.count("model> C\n") == 2 and "in s-3, without the last turn; s stays as it was" in out
    assert code == 1 and err.endswith("kvstore: there is no turn yet in this conversation\n")


def test_a_system_prompt_begins_a_conversation_and_stays_for_the_next(run):
    lines = ["/system", "a", "/system be brief", "/new", "/system", "b", "/undo", "/system"]
    _, out, _ = run("chat", "--session", "s", lines=lines)
    assert "there is no system prompt" in out and out.count("\nbe brief\n") == 2
    prompts = {
        name: session.messages[0]["role"] for name, session in FakeEngine.made[0].sessions.items() if name > "s-1"
    }
    assert prompts == {"s-2": "system", "s-3": "system", "s-4": "system"}


def test_settings_are_listed_changed_and_refused(run):
    lines = ["/set", "/set temperature 0.5", "/set seed 7", "/set max_tokens none", "a"]
    code, out, _ = run("chat", "--max-tokens", 9, lines=lines)
    assert code == 0 and "temperature 0.0\nmax_tokens 9\nseed none\ntop_p 1.0\n" in out
    params = FakeEngine.made[0].sessions["terminal"].params
    assert (params.temperature, params.seed, params.max_tokens) == (0.5, 7, None)
    for line, told in (
        ("/set temprature 1", "no setting 'temprature'; did you mean 'temperature'?"),
        ("/set temperature warm", "temperature is 'warm'; give a number from 0 to 100"),
        ("/set top_k 1.5", "top_k is 1.5; give a whole number"),
    ):
        code, _, err = run("chat", lines=[line])
        assert code == 1 and told in err


def test_a_conversation_is_saved_once(run, tmp_path):
    FakeEngine.stored = {"s": exchange(1)}
    names = [tmp_path / "a.json", tmp_path / "a.md", tmp_path / "a.md", tmp_path / "none" / "b.md", tmp_path / "a.txt"]
    code, out, err = run("chat", "--session", "s", lines=[*(f"/save {name}" for name in names), "/save"])
    saved = json.loads(names[0].read_text())
    assert (saved["session_id"], saved["model"], saved["messages"]) == ("s", "builtin", exchange(1))
    assert names[1].read_text() == "## user\n\nquestion 1\n\n## assistant\n\nanswer\x1b 1\n"
    assert out.count("2 messages in ") == 2 and code == 1
    for told in ("a.md is there already; give another name", "b.md cannot be written: No such file", "not ''"):
        assert told in err


def exchange(number):
    return [{"role": "user", "content": f"question {number}"}, {"role": "assistant", "content": f"answer\x1b {number}"}]


def test_a_resumed_conversation_shows_where_it_was(run):
    system = {"role": "system", "content": "be brief"}
    FakeEngine.stored = {"s": [system, *exchange(1), *exchange(2)], "t": [system], "u": exchange("x" * 2000)}
    _, out, _ = run("chat", "--session", "s", lines=["hello"])
    assert "resuming s after 2 turns\nyou> question 2\nmodel> answer 2\n" in out
    assert "question 1" not in out and "be brief" not in out
    assert out.index("resuming") < out.index("HELLO")
    assert "resuming" not in run("chat", "--session", "t")[1]
    _, out, _ = run("chat", "--session", "u")
    assert "after 1 turn\n" in out and "x [...]\n" in out and len(out) < 2500


def test_a_system_prompt_for_a_conversation_that_has_another_is_told_of(run):
    FakeEngine.stored = {"s": [{"role": "system", "content": "be brief"}, *exchange(1)], "t": exchange(1)}
    told = "keeps its system prompt"
    assert told in run("chat", "--session", "s", "--system", "be long")[2]
    assert told in run("chat", "--session", "t", "--system", "be long")[2]
    for more in (["s", "--system", "be brief"], ["s"], ["new", "--system", "be long"]):
        assert told not in run("chat", "--session", *more)[2]


def test_a_new_conversation_takes_an_id_without_turns(run):
    FakeEngine.stored = {"s-2": exchange(1), "s-3": exchange(2)}
    _, out, _ = run("chat", "--session", "s", lines=["a", "/new", "b"])
    sessions = FakeEngine.made[0].sessions
    assert {name: session.num_turns for name, session in sessions.items()} == {"s": 1, "s-2": 1, "s-3": 1, "s-4": 1}
    assert "resuming" not in out
    run("chat", "--session", "s" * 128, lines=["/new"])
    assert list(FakeEngine.made[1].sessions) == ["s" * 128, "s" * 126 + "-2"]


def test_a_turn_that_cannot_be_kept_does_not_end_the_chat(run):
    code, out, err = run("chat", lines=["disk full", "fine"])
    assert code == 1 and "kvstore: not stored" in err and "FINE" in out


def test_a_refused_message_does_not_end_the_chat(run):
    code, out, err = run("chat", lines=["too long", "fine"])
    assert code == 1 and "2,000 tokens" in err and "FINE" in out


def test_ctrl_c_stops_the_answer_only(run):
    code, out, _ = run("chat", lines=["slow answer", "next"])
    assert code == 0 and "SLOW" in out and "[stopped]" in out and "NEXT" in out
    assert FakeEngine.made[0].sessions["terminal"].closed_early


@pytest.mark.parametrize("becomes", [None, RuntimeError("while importing"), ModelError("cannot load")])
def test_ctrl_c_while_loading_is_130_whatever_a_library_makes_of_it(run, chat_opens, becomes):
    def engine(*arguments, **_):
        with suppress(BaseException):
            os.kill(os.getpid(), signal.SIGINT)
        if becomes is not None:
            raise becomes
        return FakeEngine(*arguments)

    chat_opens(engine)
    before = signal.getsignal(signal.SIGINT)
    code, _, err = run("chat")
    assert code == 130 and err.endswith("kvstore: interrupted\n")
    assert signal.getsignal(signal.SIGINT) is before


INTERRUPTED_EARLY = """
import os, signal, sys

class Press:
    def find_spec(self, name, path=None, target=None):
        if name == "kvstore.service.settings.options":
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # it may have been started with it ignored
sys.meta_path.insert(0, Press())
from kvstore.__main__ import main
sys.exit(main())
"""


def test_ctrl_c_while_the_modules_of_the_command_are_read_is_one_line():
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_EARLY], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "kvstore: interrupted\n")


def test_summary_names_the_tiers_that_gave_something():
    empty = make_output(1, 0, "", ttft_s=None)
    assert terminal.turn_summary(empty, 1.0) == "[prompt 1 tokens · cached 0 · computed 1]"
    output = make_output(3000, 0, "")
    output.usage = Usage(3000, 3, CachedTokensDetails(disk=1024))
    assert "cached 1,024 (disk 1,024) · computed 1,976" in terminal.turn_summary(output, 1.0)
    output.usage = Usage(3000, 3, CachedTokensDetails(hbm=1, cpu=20, disk=300, reencoded=1000))
    assert "cached 1,321 (hbm 1, cpu 20, disk 300, re-encoded 1,000)" in terminal.turn_summary(output, 1.0)


HEAVY = ("torch", "transformers", "numpy", "aiohttp", "prometheus_client", "jinja2")


FIRST = """
import json, sys
from kvstore.service.command.cli import main
for argv, heavy in json.load(sys.stdin):
    code = main(argv)
    print(code, *sorted(set(sys.modules) & set(heavy)), file=sys.stderr)
"""


def said_by(commands: Iterable[tuple[list[str], Iterable[str]]], home: Path) -> list[str]:
    """stderr of one process that runs these; after each its exit code, and what is loaded of the heavy ones beside it.

    A process of its own, since ours has loaded them all.
    """
    done = subprocess.run(
        [sys.executable, "-c", FIRST], cwd=ROOT, env={"HOME": str(home), "PATH": os.environ["PATH"]},
        input=json.dumps(list(commands)), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    return without_progress(done.stderr).splitlines()


def test_start_up_loads_nothing_that_takes_long(tmp_path):
    StoreDirectory.open(tmp_path / "store").close()
    light = [["--help"], ["serve", "--help"], ["chat", "--print-config"], ["serve", "--print-config"]]
    of_stores = [[name, "--store", str(tmp_path / "store")] for name in ("stats", "sessions")]  # records are msgspec's
    commands = [(argv, (*HEAVY, "msgspec")) for argv in light] + [(argv, HEAVY) for argv in of_stores]
    assert said_by(commands, tmp_path) == ["0"] * len(commands)


REFUSED_EARLY = [
    (["--session-store", "redis://a"], "no secret of the fleet"),
    (["--session-store", "http://a"], "--session-store is"),
    (["--data-parallel-size", "2", "--cpu", "0"], "--cpu is 0"),
    (["--data-parallel-size", "2", "--kv-events", "tcp://*:5557"], "--kv-events is set"),
    (["--disk", "1KiB"], "--disk is 1.0 KiB; give at least 1.0 MiB"),
    (["--max-model-len", "1000000"], "--max-model-len is 1000000, but the model was made for"),
    (["/no/such/model"], "/no/such/model is not a directory"),
]


def test_what_an_engine_would_refuse_is_told_before_torch_is_loaded(tmp_path):
    said = said_by([(["serve", *flags], ("torch", "transformers")) for flags, _ in REFUSED_EARLY], tmp_path)
    assert said[1::2] == ["2"] * len(REFUSED_EARLY)
    for message, (_, words) in zip(said[::2], REFUSED_EARLY, strict=True):
        assert words in message


# -- serve -----------------------------------------------------------------------------------------------------------
def test_serve_is_told_everything(no_settings, monkeypatch, tmp_path):
    monkeypatch.setenv("KVSTORE_API_KEY", "a-key-of-some-length")
    flags = ["--port", "9000", "--ttl", "2h", "--scheduling-policy", "priority", "--policy", "lru", "--load", "always"]
    flags += ["--revision", "v1", "--tokenizer", "t", "--enforce-eager", "--codec", "zstd", "--disk-per-key", "1GiB"]
    given = told_by(engine_command("serve"), ["a/model", "--store", str(tmp_path), *flags], os.environ)
    arguments, options = arguments_of("serve", with_tiers(given.settings, keeps=True))
    assert (options.port, options.ttl_s, options.api_key) == (9000, 7200.0, "a-key-of-some-length")
    expected = {"policy": "priority", "eviction": "lru", "load": "always", "revision": "v1", "tokenizer": "t"}
    expected |= {"model": "a/model", "enforce_eager": True}
    assert {name: arguments[name] for name in expected} == expected
    tiers = arguments["cache_tiers"]
    assert (tiers.disk, tiers.path, tiers.codec, tiers.disk_per_tenant) == (8 << 30, tmp_path, "zstd", 1 << 30)


def test_new_conversations_get_a_time_to_live_and_resumed_ones_keep_theirs(run):
    FakeEngine.stored = {"old": exchange(1)}
    run("chat", "--session", "new", "--ttl", "7d", lines=["a", "b", "/new", "c"])
    sessions = FakeEngine.made[0].sessions
    assert (sessions["new"].ttls, sessions["new-2"].ttls) == ([604_800.0], [604_800.0])
    run("chat", "--session", "old", "--ttl", "7d", lines=["a"])
    assert FakeEngine.made[1].sessions["old"].ttls == []
    run("chat", "--session", "new", lines=["a"])
    assert FakeEngine.made[2].sessions["new"].ttls == []
