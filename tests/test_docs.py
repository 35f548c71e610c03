"""The guides: every program in them runs as it stands and prints what the guide promises, and the README links each."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROGRAM = re.compile(r"```python\n(.*?)```", re.S)
PROMISED = {  # words of what a guide's programs print, in order
    "async.md": [("ada", "Biscuit", "bob", "Rex"), ("2 turns are stored",), ("My name is Ada. 1",)],
}


def programs() -> list[tuple[str, int, str]]:
    texts = {name: (ROOT / "docs" / name).read_text() for name in PROMISED}
    return [(name, number, code) for name in texts for number, code in enumerate(PROGRAM.findall(texts[name]))]


def test_every_guide_is_tested_and_linked():
    guides = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert guides == set(PROMISED)
    assert len(programs()) == sum(map(len, PROMISED.values()))
    readme = (ROOT / "README.md").read_text()
    assert all(f"](docs/{name})" in readme for name in guides)


@pytest.mark.parametrize(("name", "number", "program"), programs(), ids=lambda value: str(value)[:10])
def test_a_program_of_a_guide_runs(name, number, program, tmp_path, capsys):
    (tmp_path / "program.py").write_text(program)
    runpy.run_path(str(tmp_path / "program.py"), run_name="__main__")
    printed = capsys.readouterr().out
    for word in PROMISED[name][number]:
        assert word in printed
