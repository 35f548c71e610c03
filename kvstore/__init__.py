"""kvstore: blocks, tiers, transfers and policies of a tiered KV cache; and the library's public names.

`from kvstore import Engine, AsyncEngine, CacheTiers, SamplingParams`. Importing this package loads no torch and nothing
of the engine: a public name is looked up when it is asked for, the only way from here to the engine.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.async_engine import AsyncChat, AsyncEngine
    from engine.chat import ChatSession
    from engine.engine import Engine
    from engine.sampling_params import SamplingParams
    from kvstore.config import CacheTiers

__version__ = "0.1.0"
__all__ = ["AsyncChat", "AsyncEngine", "CacheTiers", "ChatSession", "Engine", "SamplingParams", "__version__"]

_HOMES = {
    "AsyncChat": "engine.async_engine",
    "AsyncEngine": "engine.async_engine",
    "CacheTiers": "kvstore.config",
    "ChatSession": "engine.chat",
    "Engine": "engine.engine",
    "SamplingParams": "engine.sampling_params",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvstore' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
