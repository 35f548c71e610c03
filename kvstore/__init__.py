"""kvstore: blocks, tiers, transfers and policies of a tiered KV cache; and the library's public names.

`from kvstore import Engine, AsyncEngine, CacheTiers, SamplingParams`, or `BlockStore` alone. Importing this package
loads no torch and nothing of the engine: a public name is looked up when it is asked for, the only way from here to the
engine.

- `blocks/`: ids, records, pools, the forest of cached blocks
- `policy/`: who stays, what comes early
- `memory/`: the CPU tier and its transfers
- `tiers/`: the port of every tier below the CPU, and the worker that uses it
- `disk/`: the disk tier
- `store/`: the control plane
- `sessions/`: durable conversations and answers
- `admin/`: commands on a store
- `planning/`: traces, sizing, replay
- `remote/`: what stores share over the network
- `hosts/`: the store under engines that people already run
- `engine/`: the engine
- `kernels/`: device code
- `rope/`: positions
- `service/`: HTTP and the command
- `__main__`: `python -m kvstore`: the command, where its script is not on the path
- `block_store`: the disk tier by itself, for other engines
- `config`: sizes, and the tiers' configuration
- `connector`: the seam between engine and store
- `errors`: the tree of exceptions
- `forks`: what a forked child must leave to its parent: files, sockets and held locks
- `owned_disk`: the disk tier of several engines on one machine, in the process that owns it
- `stats`: counters
"""

from typing import TYPE_CHECKING

from kvstore import errors
from kvstore.errors import *  # noqa: F403

if TYPE_CHECKING:
    from kvstore.block_store import BlockStore
    from kvstore.config import CacheTiers
    from kvstore.engine.async_engine import AsyncChat, AsyncEngine
    from kvstore.engine.engine import Engine
    from kvstore.engine.sampling_params import SamplingParams, StructuralTag, StructuredOutputsParams
    from kvstore.engine.sessions.chat import ChatSession
    from kvstore.engine.stats import EngineStats
    from kvstore.engine.text.prompts import AnswerOptions

__version__ = "0.1.1"
__all__ = [
    "AnswerOptions", "AsyncChat", "AsyncEngine", "BlockStore", "CacheTiers", "ChatSession", "Engine", "EngineStats",
    "SamplingParams", "StructuralTag", "StructuredOutputsParams", "__version__"
]  # fmt: skip
__all__ += errors.__all__

_HOMES = {
    "AsyncChat": "kvstore.engine.async_engine",
    "AsyncEngine": "kvstore.engine.async_engine",
    "BlockStore": "kvstore.block_store",
    "CacheTiers": "kvstore.config",
    "AnswerOptions": "kvstore.engine.text.prompts",
    "ChatSession": "kvstore.engine.sessions.chat",
    "Engine": "kvstore.engine.engine",
    "EngineStats": "kvstore.engine.stats",
    "SamplingParams": "kvstore.engine.sampling_params",
    "StructuralTag": "kvstore.engine.sampling_params",
    "StructuredOutputsParams": "kvstore.engine.sampling_params",
}

if not TYPE_CHECKING:  # to a type checker a name that is not above is an error

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module 'kvstore' has no attribute {name!r}")
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
