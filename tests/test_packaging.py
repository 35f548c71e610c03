"""What is shipped: every package with its data, and annotations that type checkers read; and that what it needs can be
installed."""

import itertools
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from zipfile import ZipFile

import pytest

import kvstore

ROOT = Path(__file__).parent.parent
FOLDERS = [ROOT / "kvstore", *(ROOT / "kvstore" / name for name in ("engine", "kernels", "rope", "service"))]
USERS_FILE = """from kvstore import CacheTiers, Engine, Motor  # fault
from kvstore import StorageEngine  # fault

tiers = CacheTiers(hbm="64MiB", disk=1.5)  # fault
with Engine(cache_tiers=tiers) as engine:
    chat = engine.chat("ada")
    reply = chat.send(17)  # fault
    cached: str = reply.usage.cached_tokens  # fault
    print(reply.text, reply.answer)  # fault
"""
PLATFORMS = ("x86_64-manylinux_2_34", "aarch64-manylinux_2_34", "aarch64-apple-darwin")  # libcachesim needs 2.34
PYTHONS = ("3.11", "3.14")  # the oldest and the newest


def run(*command: str | Path, cwd: Path = ROOT, **variables: str) -> str:
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=os.environ | variables, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(folder: Path, kind: str, target: Path) -> Path:
    run(sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", target, cwd=folder)
    return next(target.glob("*.whl" if kind == "wheel" else "*.tar.gz"))


def install(folder: Path, *what: str | Path) -> Path:
    """The interpreter of a new environment with nothing but this; the back end is that of the tests' environment."""
    uv = [sys.executable, "-m", "uv", "--no-config", "--offline"]
    run(*uv, "venv", folder)
    pip = [*uv, "pip", "install", "--python", folder, "--no-deps", "--no-build-isolation"]
    run(*pip, *what, PYTHONPATH=sysconfig.get_path("purelib"))
    return folder / "bin" / "python"


def packed(wheel: Path) -> set[str]:
    names = ZipFile(wheel).namelist()
    return {name for name in names if ".dist-info/" not in name and not Path(name).name.startswith(".")}


def test_every_file_is_shipped_under_one_name(tmp_path):
    """The builtin model, the C kernels, the page and the dashboard too; from a checkout, and from what is published."""
    there = {
        path.relative_to(ROOT).as_posix()
        for folder in FOLDERS
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc" and not path.name.startswith(".")
    }
    assert {"kvstore/py.typed", "kvstore/engine/builtin/model/model.safetensors"} <= there
    wheel = build(ROOT, "wheel", tmp_path / "wheel")
    assert packed(wheel) == there
    with tarfile.open(build(ROOT, "sdist", tmp_path / "sdist")) as sdist:
        sdist.extractall(tmp_path, filter="data")
    unpacked = tmp_path / f"kvstore_llm-{kvstore.__version__}"
    assert packed(build(unpacked, "wheel", tmp_path / "again")) == there

    python = install(tmp_path / "venv", wheel)
    assert run(python.with_name("kvstore"), "--version", cwd=tmp_path) == f"kvstore {kvstore.__version__}\n"


def test_an_editable_installation_puts_one_name_on_the_path_where_type_checkers_see_it(tmp_path):
    """The checkout's other folders have names that a user's own may have."""
    python = install(tmp_path / "venv", "--editable", ROOT)
    code = "from importlib.util import find_spec; print([n for n in %r if find_spec(n)])"
    names = ["kvstore", "engine", "kernels", "rope", "service", "bench", "tests"]
    assert run(python, "-c", code % names, cwd=tmp_path) == "['kvstore']\n"

    (tmp_path / "program.py").write_text(USERS_FILE)
    mypy = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir", tmp_path / "cache"]
    command = [*map(str, mypy), "--python-executable", str(python), "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    found = {int(number) for number in re.findall(r"^program.py:(\d+): error", done.stdout, re.M)}
    assert found == {at for at, line in enumerate(USERS_FILE.split("\n"), 1) if "# fault" in line}, done.stdout


def test_every_public_name_is_there():
    assert {name: getattr(kvstore, name).__name__ for name in kvstore.__all__ if name != "__version__"} == {
        name: name for name in kvstore.__all__ if name != "__version__"
    }
    assert not hasattr(kvstore, "Motor")
    assert dir(kvstore) == sorted(kvstore.__all__)
    errors = {name for name, value in vars(kvstore.errors).items() if isinstance(value, type)}
    assert {name for name in errors if name.endswith("Error")} <= set(kvstore.__all__)


def test_the_package_runs_as_the_command():
    assert run(sys.executable, "-m", "kvstore", "--version") == f"kvstore {kvstore.__version__}\n"


def resolution_error(platform: str, python: str) -> str:
    """Why the pins have no wheels for a platform; empty if they have. Nothing that is set up on this machine counts."""
    options = ["--python-platform", platform, "--python-version", python, "--extra", "test"]
    command = [sys.executable, "-m", "uv", "pip", "compile", "--no-config", "--quiet", "--only-binary", ":all:"]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    env |= {"UV_PYTHON_DOWNLOADS": "never", "MACOSX_DEPLOYMENT_TARGET": "14.0"}
    done = subprocess.run(
        [*command, "--constraints", "constraints.txt", *options, "pyproject.toml"], cwd=ROOT, env=env,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    return f"{platform}, Python {python}: {done.stderr}" if done.returncode else ""


@pytest.mark.filterwarnings("default:constraints.txt was not checked")
def test_the_pins_can_be_installed_on_every_platform():
    """A wheel on this machine's disk may ask for less than the registry's, and hides pins that nobody else can meet.

    Without the public registry this is skipped aloud, and fails in CI.
    """
    with ThreadPoolExecutor(max_workers=4) as pool:
        errors = "".join(pool.map(lambda case: resolution_error(*case), itertools.product(PLATFORMS, PYTHONS)))
    if "client error (Connect)" in errors and os.environ.get("CI") != "true":
        warnings.warn("constraints.txt was not checked: the registry does not answer", stacklevel=1)
        pytest.skip("the package registry does not answer")
    assert errors == ""
