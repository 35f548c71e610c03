"""The documents: links lead somewhere, commands and flags exist, and programs run and print what is promised."""

import io
import re
import runpy
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from kvstore.remote.address import PASSWORD_VARIABLE
from kvstore.remote.names import SECRET_VARIABLE
from kvstore.service.command import cli
from kvstore.service.settings.options import COMMANDS
from tests.support.service.serving import Serving, serving

ROOT = Path(__file__).parent.parent
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").iterdir()]
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text() for path in DOCUMENTS if path.suffix != ".png"}
GUIDES = [name for name in TEXTS if name.endswith(".md")]
LINK = re.compile(r"\]\(([^)\s]+)\)")
BLOCK = re.compile(r"```\w*\n(.*?)```", re.S)
PROGRAM = re.compile(r"```python\n(.*?)```", re.S)
URL = "http://127.0.0.1:8000"
PROMISED = {  # words of what the programs of a document print, in order
    "README.md": [("Biscuit", "tokens were cached")],
    "docs/library.md": [
        ("Biscuit", "2 turns were kept"),
        ('{"name":"', ',"age":'),
        ("ada", "Biscuit", "bob", "Rex"),
        ("2 turns are stored",),
        ("My name is Ada. 1",),
    ],
    "docs/server.md": [("Ada",)],
    "docs/agents.md": [
        ('tool_calls weather {"city": "', "tokens were cached"),
        ("clock True",),
        ("length True True", "True True dropped", "kept dropped"),
        ("Hello, my name",),
        ("the built-in demo model", "end_turn"),
    ],
    "docs/block-store.md": [("True means", "[True, True, False] True True", "2 blocks")],
}
PROGRAMS = [(name, at, code) for name in PROMISED for at, code in enumerate(PROGRAM.findall(TEXTS[name]))]


# -- links -----------------------------------------------------------------------------------------------------------
def anchors(text: str) -> set[str]:
    """As GitHub makes them of headings."""
    found = re.findall(r"^#+ (.*)$", BLOCK.sub("", text), re.M)
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in found}


def broken_links(name: str, text: str) -> Iterator[str]:
    for target in LINK.findall(BLOCK.sub("", text)):
        if re.match(r"https?:|mailto:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (ROOT / name).parent / file if file else ROOT / name
        if not path.is_file() or (anchor and anchor not in anchors(path.read_text())):
            yield f"{name}: {target}"


def test_a_broken_link_is_found():
    text = "[a](README.md) [b](nowhere.md) [c](README.md#nothing)\n```\n[d](code.md)\n```"
    assert list(broken_links("README.md", text)) == ["README.md: nowhere.md", "README.md: README.md#nothing"]


@pytest.mark.parametrize("name", GUIDES)
def test_every_relative_link_leads_somewhere(name):
    assert list(broken_links(name, TEXTS[name])) == []


def test_the_readme_links_every_guide():
    linked = {target for text in (TEXTS["README.md"], TEXTS["docs/command-line.md"]) for target in LINK.findall(text)}
    assert {Path(name).name for name in GUIDES} - {"README.md"} <= {Path(target).name for target in linked}


# -- commands ---------------------------------------------------------------------------------------------------------


def commands(text: str) -> Iterator[list[str]]:
    """Every `kvstore ...` in blocks and in quotes, as words."""
    quoted = re.findall(r"`(kvstore [^`\n]*)`", BLOCK.sub("", text))
    blocks = [line for block in BLOCK.findall(text) for line in block.split("\n")]
    for line in [*quoted, *blocks]:
        for part in re.split(r"[;|]| > ", line.partition(" #")[0]):
            words = part.split()
            if len(words) > 1 and words[0].endswith("kvstore") and words[1] in COMMANDS:
                yield words[1:]


@pytest.fixture(scope="module")
def shown() -> dict[str, set[str]]:
    """The flags of each command's help."""
    found = {}
    for command in COMMANDS:
        with redirect_stdout(io.StringIO()) as out:
            cli.main([command, "--help"])
        found[command] = set(re.findall(r"--[a-z][a-z-]*", out.getvalue()))
    return found


@pytest.mark.parametrize("name", TEXTS)
def test_every_flag_in_a_document_exists(name, shown):
    wrong = []
    for command, *words in commands(TEXTS[name]):
        wrong += [f"{command} {word}" for word in words if word.startswith("--") and word not in shown[command]]
    known = set().union(*shown.values())
    secrets = {PASSWORD_VARIABLE, SECRET_VARIABLE}  # which no flag may hold
    mirrors = secrets | {"KVSTORE_" + flag[2:].replace("-", "_").upper() for flag in known}
    wrong += [one for one in re.findall(r"KVSTORE_[A-Z_]+[A-Z]", TEXTS[name]) if one not in mirrors]
    assert wrong == []


# -- programs ----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    tiers = {"hbm": "8MiB", "cpu": "16MiB", "disk": "16MiB", "path": tmp_path_factory.mktemp("store")}
    with serving(engine={"cache_tiers": tiers}) as running:
        yield running


def test_every_program_is_run():
    assert {name: len(PROGRAM.findall(text)) for name, text in TEXTS.items() if PROGRAM.search(text)} == {
        name: len(words) for name, words in PROMISED.items()
    }


@pytest.mark.parametrize(("name", "at", "program"), PROGRAMS, ids=[f"{name}-{at}" for name, at, _ in PROGRAMS])
def test_a_program_of_a_document_runs(name, at, program, server, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "program.py").write_text(program.replace(URL, server.url))
    runpy.run_path(str(tmp_path / "program.py"), run_name="__main__")
    printed = capsys.readouterr().out
    for word in PROMISED[name][at]:
        assert word in printed


@pytest.mark.parametrize("name", ["README.md", "docs/server.md"])
def test_what_is_said_to_curl_is_answered(name, server):
    """The two turns of one session."""
    session_id = ""
    for words in map(shlex.split, re.findall(r"^curl .*$", TEXTS[name], re.M)):
        url, body = words[1].replace("localhost:8000", server.url), words[3].replace("ID", session_id)
        done = subprocess.run(["curl", "-sS", url, "-d", body], capture_output=True, text=True, timeout=60, check=True)
        found = re.search(r'"session_id":"(\w+)","turn":(\d)', done.stdout)
        assert found is not None, done.stdout
        assert session_id in ("", found[1])
        session_id = found[1]
    assert found[2] == "2" and "Ada." in done.stdout
