"""`kvstore stats|evict|verify|compact|sessions`: beside an owner in another process, and alone on a real store."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from kvstore.config import DURATION
from kvstore.errors import StoreLockedError
from kvstore.service.command import store as store_commands
from kvstore.service.command import store_tables
from tests.support.service.server_process import run_command, without_progress
from tests.support.store.small_store import NUM_OWN, block_ids, damage, make_store
from tests.support.waiting import TIMEOUT_S

ROOT = Path(__file__).parents[3]
COMMANDS = ("stats", "evict", "verify", "compact", "sessions")
AGE = r"\d+ (s|min|h)"  # of the store that all tests here begin with


@pytest.fixture
def silence_s():
    """How long an owner may be silent."""
    return TIMEOUT_S


@pytest.fixture
def run(run, monkeypatch, silence_s):
    monkeypatch.setattr(store_commands, "SILENCE_S", silence_s)
    return run


@pytest.fixture
def owner(tmp_path):
    """Starts an owner of tmp_path/"owned" in another process; gives (path, process)."""
    started = []

    def start(**answers):
        path = tmp_path / "owned"
        command = [sys.executable, "-m", "tests.children.store_owner", str(path), json.dumps(answers)]
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return path, process

    yield start
    for process in started:
        process.kill()
        process.communicate()


# -- alone -----------------------------------------------------------------------------------------------------------
def test_stats_alone(run, store):
    code, out, err = run("stats", "--store", store.path)
    assert (code, err) == (0, "")
    assert re.search(rf"disk +{store.num_blocks} +[0-9.]+ KiB / 32.0 MiB +[0-9]+%", out)
    assert "sessions" in out and "2, with 2 turns" in out and "model red-model" in out


@pytest.mark.parametrize("command", COMMANDS)
def test_json_is_one_object_and_nothing_else(run, store, command):
    arguments = ["--all", "--dry-run"] if command == "evict" else []
    code, out, err = run(command, "--store", store.path, "--json", *arguments)
    assert (code, err) == (0, "")
    assert isinstance(json.loads(out), dict) and out.count("\n") == 1


def test_verify_alone(run, store):
    code, out, err = run("verify", "--store", store.path)
    assert (code, err) == (0, "") and f"blocks: {store.num_blocks} sound, 0 damaged" in out and "all is well" in out
    damage(store, store.shared[2])
    code, out, _ = run("verify", "--store", store.path)
    assert code == 4 and "1 damaged" in out and "--delete takes them out" in out and "damage was found" in out
    code, out, _ = run("verify", "--store", store.path, "--delete")
    assert code == 4 and f"deleted {1 + 2 * NUM_OWN} blocks" in out
    assert run("verify", "--store", store.path)[0] == 0
    assert block_ids(store) == {*store.shared[:2], *store.lone}


@pytest.mark.filterwarnings("default")
def test_a_file_damaged_as_a_whole_is_said_in_one_line_and_found(store):
    (store.path / "sessions" / "data.mdb").write_bytes(b"text" * 1000)
    done = run_command("verify", "--store", store.path, PYTHONWARNINGS="default")
    assert done.returncode == 4 and "was moved to quarantine-" in done.stdout
    said = [line for line in done.stderr.splitlines() if not line.startswith("kvstore: checking since")]
    assert said[0].startswith("kvstore: sessions of the store is damaged") and len(said) == 2
    assert said[1].startswith("kvstore: the sessions that this store held are not there")


def test_sessions_alone(run, store):
    code, out, _ = run("sessions", "--store", store.path)
    assert code == 0 and re.search(rf"bert +I am bert +1 +80 +{AGE} +–", out)
    assert out.index("bert") < out.index("anna")
    assert "no sessions of tenant x" in run("sessions", "--store", store.path, "--tenant", "x")[1]
    assert "anna" not in run("sessions", "--store", store.path, "--limit", "1")[1]
    code, out, _ = run("sessions", "delete", "--store", store.path, "anna")
    assert (code, out) == (0, f"session anna is deleted, with {NUM_OWN} blocks that no other session refers to\n")
    code, out, err = run("sessions", "delete", "anna", "--store", store.path)
    assert (code, out) == (1, "") and "there is no session 'anna'" in err and err.count("\n") == 1
    assert len(block_ids(store)) == store.num_blocks - NUM_OWN
    run("sessions", "delete", "--store", store.path, "bert")
    assert run("sessions", "--store", store.path)[1] == "no sessions\n"


def test_the_transcript_of_a_session(run, store):
    code, out, err = run("sessions", "show", "anna", "--store", store.path)
    assert (code, err) == (0, "")
    assert re.match(rf"anna: red-model, 1 turn, 80 tokens, last used {AGE} ago\n", out)
    assert out.endswith("you> I am anna\nmodel> hello anna\n")
    found = json.loads(run("sessions", "show", "anna", "--json", "--store", store.path)[1])
    assert found["session"]["id"] == "anna" and found["session"]["expires_s"] is None
    assert [message["content"] for message in found["messages"]] == ["I am anna", "hello anna"]
    code, out, err = run("sessions", "show", "anna", "--tenant", "t", "--store", store.path)
    assert (code, out) == (1, "") and "there is no session 'anna' of tenant 't'" in err
    listed = [run("sessions", *verb, "--json", "--store", store.path)[1] for verb in ((), ("list",))]
    assert listed[0] == listed[1]


def test_a_transcript_is_printed_as_text(capsys):
    session = {"id": "x", "turns": 2, "tokens": 1, "updated_s": 0.0, "expires_s": 0.0, "model": "m"}
    said = [("system", "be brief"), ("user", "[b]a\x1b[31m[/b]"), ("tool", "")]
    said = [{"role": role, "content": content} for role, content in said]
    asked = [{"function": {"name": "f", "arguments": arguments}} for arguments in ('{"a": 1}', {"b": "ü"})]
    said += [{"role": "assistant", "content": content, "tool_calls": asked} for content in ("", "I look.")]
    store_tables.show_transcript("x", {"session": session, "messages": said}, Console(width=20))
    out = capsys.readouterr().out
    assert "2 turns" in out and "expires due" in out
    assert "system> be brief\nyou> [b]a[31m[/b]\ntool> \n" in out
    calls = 'f({"a": 1})\nf({"b": "ü"})\n'
    assert out.endswith(f"model> {calls}model> I look.\n{calls}")


def test_watching_goes_on_until_ctrl_c_which_is_no_failure(run, store, monkeypatch):
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(store_commands, "sleep", sleep)
    code, out, err = run("stats", "--store", store.path, "--watch", "--json")
    assert (code, err, waits) == (0, "", [2.0] * 3)
    assert [json.loads(line)["sessions"]["sessions"] for line in out.splitlines()] == [2, 2, 2]
    waits.clear()
    code, out, err = run("stats", "--watch", "0.5", "--store", store.path)
    assert (code, err, waits) == (0, "", [0.5] * 3) and out.count("2, with 2 turns") == 3


def test_the_default_store_is_with_the_data_and_an_old_one_is_told(run, tmp_path, monkeypatch):
    assert "yours is in" not in (err := run("stats")[2]) and f"{tmp_path}/home/.local/share/kvstore" in err
    make_store(tmp_path / "home" / ".cache" / "kvstore")
    code, _, err = run("sessions")
    assert code == 1 and "yours is in" in err.splitlines()[0] and err.count("\n") == 2
    assert f"--store {tmp_path}/home/.cache/kvstore" in err.splitlines()[0]
    assert run("sessions", "--store", tmp_path / "home" / ".cache" / "kvstore")[2] == ""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    make_store(tmp_path / "data" / "kvstore")
    assert run("sessions")[::2] == (0, ""), "the new place is in use"
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    assert f"{tmp_path}/home/.local/share/kvstore" in run("stats")[2]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_store_is_one_line_and_is_not_made(run, tmp_path, command):
    arguments = ["--all"] if command == "evict" else []
    code, out, err = run(command, "--store", tmp_path / "nowhere", *arguments)
    remedy = "give the directory of one, which `kvstore serve` begins"
    assert (code, out, err) == (1, "", f"kvstore: there is no store at {tmp_path}/nowhere; {remedy}\n")
    code, _, err = run(command, *arguments)  # the default
    assert code == 1 and f"{tmp_path}/home/.local/share/kvstore" in err
    assert not (tmp_path / "nowhere").exists() and not (tmp_path / "home").exists()


# -- flags -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("argv", "words"), [
    (["evict"], "give at least one of --all, --unused-for, --session, --model, --to-size"),
    (["evict", "--unused-for", "7"], "--unused-for is '7'; give a number with a unit, such as 90s"),
    (
        ["evict", "--to-size", "lots"],
        "--to-size is 'lots'; give a number of bytes, or a number with a unit such as",
    ),
    (["evict", "--session", "../x"], "--session is '../x'"),
    (["evict", "--all=1"], "--all"),
    (["evict", "x", "--all"], "unexpected argument 'x'; evict has flags only"),
    (["stats", "--jsno"], "did you mean '--json'?"),
    (["stats", "--store", ""], "--store is ''; give the directory"),
    (["stats", "--store", "~nobody-has-this-name/x"], "no such user's home"),
    (["sessions", "--limit", "99999"], "--limit is '99999'; give a whole number from 1 to 10000"),
    (["sessions", "delte", "x"], "unknown argument 'delte'; did you mean 'delete'?"),
    (["sessions", "delete"], "sessions delete takes one ID, not 0"),
    (["sessions", "delete", "../x"], "ID is '../x'"),
    (["sessions", "list", "a"], "sessions list takes no ID, not 1"),
    (["stats", "--watch", "0"], "--watch is '0'; give seconds from 0.1"),
])  # fmt: skip
def test_wrong_usage_is_one_line_and_exit_2(run, argv, words):
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert words in err and err.startswith("kvstore: ") and err.count("\n") == 1


def test_durations():
    texts = ("90s", "15m", "2h", "7d", "1.5w", "0s")
    assert [DURATION.read("x", text) for text in texts] == [90, 900, 7200, 604_800, 907_200, 0]


def test_flags_are_mirrored_but_not_what_is_deleted(run, store, monkeypatch):
    monkeypatch.setenv("KVSTORE_STORE", str(store.path))
    monkeypatch.setenv("KVSTORE_JSON", "1")
    monkeypatch.setenv("KVSTORE_LIMIT", "1")
    assert len(json.loads(run("sessions")[1])["sessions"]) == 1
    monkeypatch.setenv("KVSTORE_TENANT", "other")
    assert json.loads(run("sessions")[1]) == {"sessions": []}
    monkeypatch.setenv("KVSTORE_SESSION", "anna")
    for name in ("ALL", "DELETE", "DRY_RUN"):
        monkeypatch.setenv(f"KVSTORE_{name}", "1")
    code, out, err = run("evict")
    assert code == 2 and "at least one of" in err
    assert json.loads(run("evict", "--model", "none")[1]) == {
        "dry_run": False,
        "tiers": {"disk": {"blocks": 0, "bytes": 0}},
    }
    monkeypatch.setenv("KVSTORE_JSON", "maybe")
    code, out, err = run("stats")
    assert (code, out) == (2, "") and "KVSTORE_JSON is 'maybe'; give true or false" in err


# -- beside an owner -------------------------------------------------------------------------------------------------
def test_everything_goes_through_the_owner(run, owner):
    tiers = {"hbm": {"blocks": 1, "bytes": 10}, "disk": {"blocks": 20_000, "bytes": 5 << 30}}
    now_s = time.time()
    session = {"id": "x", "turns": 3, "tokens": 12_000, "updated_s": now_s - 7200, "expires_s": now_s + 1.4 * 86400}
    sessions = [session | {"title": "a\x1b[31m[b]b"}]
    path, process = owner(
        stats={"model": "a/model[bold]"}, evict={"dry_run": True, "tiers": tiers},
        verify={"num_ok": 3, "bad_ids": ["ab"], "num_corrupt": 1, "num_deleted": 1},
        compact={"before_bytes": 3 << 20, "after_bytes": 1 << 20}, sessions={"sessions": sessions},
        **{"sessions.delete": {"deleted": True, "blocks": 1234}},
    )  # fmt: skip

    def asked():
        return json.loads(process.stdout.readline())

    code, out, err = run("stats", "--store", path)
    assert (code, err, asked()) == (0, "", ["stats", {}])
    assert "model a/model[bold]" in out
    assert json.loads(run("stats", "--store", path, "--json")[1]) == {"model": "a/model[bold]"} and asked()

    flags = ["--unused-for", "2h", "--session", "s", "--tenant", "t", "--to-size", "2GiB", "--dry-run"]
    code, out, _ = run("evict", "--store", path, *flags)
    session = {"tenant": "t", "session_id": "s"}
    arguments = {"unused_for_s": 7200.0, "session": session, "to_bytes": 2 << 30, "dry_run": True}
    assert (code, asked()) == (0, ["evict", arguments])
    assert out == "hbm: 1 block, 10 B would be evicted\ndisk: 20,000 blocks, 5.0 GiB would be evicted\n"
    assert run("evict", "--store", path, "--all")[0] == 0 and asked() == ["evict", {"all": True}]

    code, out, _ = run("verify", "--store", path, "--delete")
    assert (code, asked()) == (4, ["verify", {"delete": True}]) and "deleted 1 block: what was damaged" in out
    code, out, _ = run("compact", "--store", path)
    assert (code, asked()) == (0, ["compact", {}]) and "3.0 MiB before, 1.0 MiB now; 2.0 MiB given back" in out
    assert run("compact", "--store", path, "--codec", "zstd")[0] == 0 and asked() == ["compact", {"codec": "zstd"}]

    code, out, _ = run("sessions", "--store", path, "--tenant", "t", "--limit", "7")
    assert (code, asked()) == (0, ["sessions", {"tenant": "t", "limit": 7}])
    assert re.search(r"x +a\[31m\[b\]b +3 +12,000 +2 h +in 1 d", out) and "\x1b" not in out
    code, out, _ = run("sessions", "delete", "x", "--store", path)
    assert (code, asked()) == (0, ["sessions.delete", {"session": {"session_id": "x"}}])
    assert "1,234 blocks" in out


@pytest.mark.parametrize(("kind", "expected"), [("ConfigError", 2), ("StoreError", 1), ("RequestError", 1)])
def test_an_error_of_the_owner(run, owner, kind, expected):
    path, _ = owner(stats=kind)
    assert run("stats", "--store", path) == (expected, "", f"kvstore: it was {kind}\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_an_owner_without_a_socket_is_exit_3_with_its_pid(run, owner, command):
    path, process = owner(silent=True)
    code, out, err = run(command, "--store", path, *(["--all"] if command == "evict" else []))
    assert (code, out) == (3, "") and f"process {process.pid}" in err and err.count("\n") == 1


@pytest.mark.parametrize("silence_s", [0.3])
def test_an_owner_that_does_not_answer_is_exit_3(run, owner):
    path, process = owner()
    process.send_signal(signal.SIGSTOP)
    code, out, err = run("stats", "--store", path)
    process.send_signal(signal.SIGCONT)
    assert (code, out) == (3, "") and f"process {process.pid}, which was silent for 0.3 s" in err


@pytest.mark.parametrize("message", ["the store is in use", "the store is in use by process 4242"])
def test_an_engine_whose_store_is_locked_is_exit_3(run, chat_opens, tmp_path, message):
    def locked(*_, **__):
        raise StoreLockedError(message, 4242)

    chat_opens(locked)
    code, _, err = run("chat", "--store", tmp_path)
    last = err.splitlines()[-1]
    assert code == 3 and last.count("4242") == 1 and last.startswith("kvstore: the store is in use")


# -- as a program ----------------------------------------------------------------------------------------------------
def test_the_reader_may_go_away(store):
    for flags in ("", "--json"):
        listing = f"{sys.executable} -m kvstore.service.command.cli sessions --store {store.path} {flags}"
        script = f"{listing} | true; echo ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert without_progress(done.stderr) == "" and done.stdout.strip() in ("0", "1")


# -- tables ----------------------------------------------------------------------------------------------------------
def test_lengths_of_time():
    texts = [store_tables.short_time(s) for s in (-5, 59, 60, 7199, 7200, 86400 * 3, 86400 * 7 - 1)]
    assert texts == ["0 s", "59 s", "1 min", "2 h", "2 h", "3 d", "7 d"]


def test_tables_tolerate_what_is_missing(capsys):
    out = Console()
    store_tables.show_evicted({"dry_run": False, "tiers": {}}, out)
    store_tables.show_verified(False, {}, out)
    store_tables.show_compacted({}, out)
    printed = capsys.readouterr().out
    assert "there is no tier" in printed and "all is well" in printed


@pytest.mark.parametrize("report", [
    {"bad_ids": ["x"], "num_deleted": 1},
    {"is_complete": False},
    {"set_aside": ["q/blocks"]},
    {"sessions": {"num_sessions": 1, "num_turns": 1, "problems": ["session a is damaged"]}},
])  # fmt: skip
def test_damage_of_any_kind_is_damage(report, capsys):
    assert not store_tables.is_sound(report)
    store_tables.show_verified(True, report, Console())
    assert "damage was found" in capsys.readouterr().out


def test_a_title_is_cut(capsys):
    session = {"id": "x", "turns": 1, "tokens": 1, "updated_s": 0, "title": "word " * 40}
    store_tables.show_sessions("", {"sessions": [session]}, Console(width=200))
    assert "…" in capsys.readouterr().out
