"""The file that holds vLLM's memory tier and is as large as that: a killed vLLM leaves it behind.

Knows how vLLM names the file; imports nothing of vLLM.
"""

from __future__ import annotations

import re
from pathlib import Path

from kvstore.disk.check import write_durably

FILE_NAME = "vllm-memory"
_MEMORY = re.compile(r"/dev/shm/vllm_offload_[\w.-]+\.mmap")


def remove_left_memory(folder: Path, engine_id: str) -> Path | None:
    """Remove the file of the vLLM that owned this store before, and note that of its present owner.

    folder: the store's. Its owner knows that the previous one has ended. Returns the removed file. Raises OSError.
    """
    note, mine = folder / FILE_NAME, f"/dev/shm/vllm_offload_{engine_id}.mmap"
    try:
        before = note.read_text()
    except FileNotFoundError:
        before = ""
    write_durably(note, mine.encode())
    left = Path(before)
    if before == mine or not _MEMORY.fullmatch(before) or not left.is_file():
        return None
    left.unlink()
    return left
