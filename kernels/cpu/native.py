"""The C code of this folder, compiled once by the machine's own compiler and kept in the user's cache.

It does what torch has no operation for on a CPU: several small operations in one pass, and products that fetch weights
ahead. Without a compiler, torch operations do the same work.
"""

import ctypes
import hashlib
import logging
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch  # noqa: F401 - so that the compiled code finds torch's OpenMP

SOURCES = ("decode.c", "prefill.c", "layer.c", "copy.c", "masks.c", "states.c", "threads.c")
HEADERS = ("vectors.h", "tiles.h", "team.h")
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-ffp-contract=off", "-fopenmp", "-fPIC", "-shared", "-std=gnu11")
_COMPILE_S = 60.0

logger = logging.getLogger(__name__)


@cache
def library() -> ctypes.CDLL | None:
    """The compiled code, or None. Compiling takes a second or two, once per machine and version of the sources."""
    folder = Path(__file__).parent
    sources = [folder / name for name in SOURCES]
    try:
        path = _built(sources)
        return None if path is None else ctypes.CDLL(str(path))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        logger.info("no compiled kernels on this CPU, torch operations instead: %s", str(error).splitlines()[0])
        return None


def declared(library: ctypes.CDLL, arguments: Mapping[str, Sequence[Any]]) -> dict[str, Callable[..., int]]:
    """Functions of the compiled code by name. They take arguments of these types and return an int."""
    functions = {}
    for name, types in arguments.items():
        functions[name] = getattr(library, name)
        functions[name].argtypes, functions[name].restype = types, ctypes.c_int
    return functions


def _built(sources: list[Path]) -> Path | None:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return None
    digest = hashlib.sha256("\0".join((*_FLAGS, _cpu_flags())).encode())
    for file in (*sources, *(sources[0].parent / name for name in HEADERS)):
        digest.update(file.read_bytes())
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvstore-kernels"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_uid != os.getuid():
        raise OSError(f"{folder} belongs to somebody else")
    target = folder / f"kernels-{digest.hexdigest()[:24]}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / "made.so"
            command = [os.environ.get("CC") or "cc", *_FLAGS, "-o", str(made), *map(str, sources), "-lm"]
            try:
                subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_S)
            except subprocess.CalledProcessError:  # an assembler may be older than its compiler
                subprocess.run([*command, "-mno-amx-tile"], check=True, capture_output=True, timeout=_COMPILE_S)
            made.replace(target)
    return target


def _cpu_flags() -> str:
    """The features of the processor, because different machines may share a cache."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith("flags")), "")
