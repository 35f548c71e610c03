"""What is shipped: every package with its data, and the marker by which type checkers read our annotations."""

import subprocess
import sys
import tomllib
from pathlib import Path

from setuptools import find_packages

import kvstore

ROOT = Path(__file__).parent.parent
SETUP = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
FOLDERS = [ROOT / "kvstore", *(ROOT / "kvstore" / name for name in ("engine", "kernels", "rope", "service"))]


def test_every_package_is_shipped():
    """Under one name: a folder of code without an `__init__` would be left out."""
    found = set(find_packages(str(ROOT), include=SETUP["packages"]["find"]["include"]))
    there = {file.parent.relative_to(ROOT) for top in FOLDERS for file in top.rglob("*.py")}
    assert found == {".".join(folder.parts) for folder in there}
    assert {name.split(".")[0] for name in found} == {"kvstore"}


def test_annotations_are_shipped():
    assert "py.typed" in SETUP["package-data"]["kvstore"]
    assert (ROOT / "kvstore" / "py.typed").read_bytes() == b""


def test_every_file_beside_the_code_is_shipped():
    """A folder more, such as one of vendored scripts, needs a pattern of its own."""
    shipped = set()
    for package, patterns in SETUP["package-data"].items():
        folder = ROOT / package.replace(".", "/")
        shipped |= {file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}
    there = {
        file
        for top in FOLDERS
        for file in top.rglob("*")
        if file.is_file() and file.suffix not in (".py", ".pyc") and not file.name.startswith(".")
    }
    assert there - shipped == set()


def test_every_public_name_is_there():
    assert {name: getattr(kvstore, name).__name__ for name in kvstore.__all__ if name != "__version__"} == {
        name: name for name in kvstore.__all__ if name != "__version__"
    }
    assert not hasattr(kvstore, "Motor")


def test_the_package_runs_as_the_command():
    done = subprocess.run([sys.executable, "-m", "kvstore", "--version"], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == f"kvstore {kvstore.__version__}\n", done.stderr
