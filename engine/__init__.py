"""The V1-style engine: `from engine import Engine, SamplingParams, CacheTiers`. Importing it does not load torch."""

from typing import TYPE_CHECKING

from engine.sampling_params import SamplingParams
from kvstore.config import CacheTiers

if TYPE_CHECKING:
    from engine.async_engine import AsyncChat, AsyncEngine
    from engine.chat import ChatSession
    from engine.engine import Engine

__all__ = ["AsyncChat", "AsyncEngine", "CacheTiers", "ChatSession", "Engine", "SamplingParams"]

_LAZY = {
    "Engine": "engine.engine",
    "AsyncEngine": "engine.async_engine",
    "AsyncChat": "engine.async_engine",
    "ChatSession": "engine.chat",
}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'engine' has no attribute {name!r}")
