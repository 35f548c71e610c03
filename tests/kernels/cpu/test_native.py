"""The C code is compiled once, kept, and done without where that is not possible."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.kernels.cpu import native
from tests.support.faults import constants


@pytest.fixture(autouse=True, scope="module")
def small() -> Iterator[None]:
    """One file stands for all, which take many seconds."""
    with constants(native, SOURCES=("masks.c",), HEADERS=()):
        yield


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.library.cache_clear()
    yield
    native.library.cache_clear()


@pytest.fixture(scope="module")
def compiled(small: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of kernels, which was made here."""
    folder = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        native.library.cache_clear()
        if native.library() is None:
            pytest.skip("no compiler here")
    return folder


def built(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "kvstore-kernels").glob("*.so"))


def test_it_is_compiled_once_and_kept(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (made,) = built(compiled)
    before = made.stat().st_mtime_ns
    monkeypatch.setenv("XDG_CACHE_HOME", str(compiled))
    monkeypatch.setenv("CC", "/nonexistent/cc")
    assert native.library() is not None, "from the cache, without a compiler"
    assert [made] == built(compiled) and made.stat().st_mtime_ns == before


@pytest.mark.parametrize("compiler", ["/nonexistent/cc", "false", "true"])
def test_without_a_compiler_that_works_there_is_none(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", compiler)
    assert native.library() is None
    assert built(tmp_path) == []


def test_a_cache_that_cannot_be_made_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert native.library() is None


def test_a_damaged_file_is_no_error(compiled: Path, tmp_path: Path) -> None:
    (made,) = built(compiled)
    damaged = tmp_path / made.relative_to(compiled)
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"not a library")
    assert native.library() is None
