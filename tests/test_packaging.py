"""What is shipped: every package with its data, and the marker by which type checkers read our annotations; and that
what it needs can be installed."""

import itertools
import os
import subprocess
import sys
import tomllib
import urllib.request
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from setuptools import find_packages

import kvstore

ROOT = Path(__file__).parent.parent
SETUP = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
FOLDERS = [ROOT / "kvstore", *(ROOT / "kvstore" / name for name in ("engine", "kernels", "rope", "service"))]
REGISTRY = "https://pypi.org/simple/"
PLATFORMS = ("x86_64-manylinux_2_34", "aarch64-manylinux_2_34", "aarch64-apple-darwin")  # libcachesim needs 2.34
PYTHONS = ("3.11", "3.12", "3.13", "3.14")


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


@pytest.fixture
def registry() -> str:
    """The public one: without it a test is skipped aloud, and fails in CI."""
    try:
        urllib.request.urlopen(f"{REGISTRY}uv/", timeout=10).close()
    except OSError as error:
        if os.environ.get("CI") == "true":
            raise
        warnings.warn(f"constraints.txt was not checked: {REGISTRY} does not answer ({error})", stacklevel=1)
        pytest.skip("the package registry does not answer")
    return REGISTRY


def resolution_error(registry: str, platform: str, python: str) -> str:
    """Why the pins have no wheels for a platform; empty if they have. Nothing that is set up on this machine counts."""
    options = ["--python-platform", platform, "--python-version", python, "--extra", "test"]
    command = [sys.executable, "-m", "uv", "pip", "compile", "--no-config", "--quiet", "--only-binary", ":all:"]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    env |= {"UV_PYTHON_DOWNLOADS": "never", "MACOSX_DEPLOYMENT_TARGET": "14.0"}
    done = subprocess.run(
        [*command, "--default-index", registry, "--constraints", "constraints.txt", *options, "pyproject.toml"],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    return f"{platform}, Python {python}: {done.stderr}" if done.returncode else ""


@pytest.mark.filterwarnings("default:constraints.txt was not checked")
def test_the_pins_can_be_installed_on_every_platform(registry):
    """A wheel on this machine's disk may ask for less than the registry's, and hides pins that nobody else can meet."""
    with ThreadPoolExecutor(max_workers=4) as pool:
        errors = list(pool.map(lambda case: resolution_error(registry, *case), itertools.product(PLATFORMS, PYTHONS)))
    assert "".join(errors) == ""
