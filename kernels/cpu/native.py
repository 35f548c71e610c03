"""The C code of this folder, compiled once by the machine's own compiler and kept in the user's cache.

It does what torch has no operation for on a CPU: several small operations in one pass, and products that fetch weights
ahead; and it packs stored blocks. Without a compiler, operations of torch and numpy do the same work.
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

SOURCES = ("decode.c", "prefill.c", "layer.c", "copy.c", "masks.c", "states.c", "threads.c")
HEADERS = ("vectors.h", "tiles.h", "team.h")
CODEC_SOURCES = ("exact12.c", "int8.c")
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-ffp-contract=off", "-fPIC", "-shared", "-std=gnu11")
_COMPILE_S = 60.0

logger = logging.getLogger(__name__)


@cache
def library() -> ctypes.CDLL | None:
    """The compiled code, or None. Compiling takes a second or two, once per machine and version of the sources."""
    import torch  # noqa: F401 - so that the compiled code finds torch's OpenMP

    return _loaded("kernels", SOURCES, HEADERS, (*_FLAGS, "-fopenmp"), "no compiled kernels on this CPU, torch")


@cache
def codec_library() -> ctypes.CDLL | None:
    """The compiled codec of stored blocks, or None: a library of its own, for processes without torch."""
    return _loaded("codec", CODEC_SOURCES, (), _FLAGS, "no compiled codec on this CPU, numpy")


@cache
def codec_functions(name: str, types: tuple[Any, ...]) -> tuple[Callable[..., int], Callable[..., int]] | None:
    """What encodes in this codec, and what decodes; both take arguments of these types. None if nothing is compiled."""
    library = codec_library()
    if library is None:
        return None
    encode, decode = declared(
        library, dict.fromkeys((f"kvstore_{name}_encode", f"kvstore_{name}_decode"), types)
    ).values()
    return encode, decode


def _loaded(
    name: str, sources: Sequence[str], headers: Sequence[str], flags: Sequence[str], otherwise: str
) -> ctypes.CDLL | None:
    folder = Path(__file__).parent
    try:
        path = _built(name, [folder / one for one in sources], [folder / one for one in headers], flags)
        return None if path is None else ctypes.CDLL(str(path))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        logger.info("%s operations instead: %s", otherwise, str(error).splitlines()[0])
        return None


def declared(library: ctypes.CDLL, arguments: Mapping[str, Sequence[Any]]) -> dict[str, Callable[..., int]]:
    """Functions of the compiled code by name. They take arguments of these types and return an int."""
    functions = {}
    for name, types in arguments.items():
        functions[name] = getattr(library, name)
        functions[name].argtypes, functions[name].restype = types, ctypes.c_int
    return functions


def _built(name: str, sources: list[Path], headers: list[Path], flags: Sequence[str]) -> Path | None:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return None
    digest = hashlib.sha256("\0".join((*flags, _cpu_flags())).encode())
    for file in (*sources, *headers):
        digest.update(file.read_bytes())
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvstore-kernels"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_uid != os.getuid():
        raise OSError(f"{folder} belongs to somebody else")
    target = folder / f"{name}-{digest.hexdigest()[:24]}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / "made.so"
            command = [os.environ.get("CC") or "cc", *flags, "-o", str(made), *map(str, sources), "-lm"]
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
