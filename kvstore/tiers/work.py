"""Pieces of a worker's work: what an executor takes and runs, and how it ended.

Knows no thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kvstore.blocks.records import ReadResult
from kvstore.tiers.port import Chain, Rank, ReadJob, Stored, WriteBatch
from kvstore.tiers.queues import Task


class Lane(Enum):
    """Work of one lane goes in order, or by rank, beside that of the others."""

    READ = "read"
    WRITE = "write"
    ASK = "ask"


@dataclass(frozen=True, slots=True)
class ReadDone:
    """num_active: reads at work meanwhile, this one included, on average."""

    job: ReadJob
    result: ReadResult
    seconds: float
    num_active: float = 1.0


@dataclass(frozen=True, slots=True)
class WriteDone:
    """A batch has ended; see `Written`."""

    batch: WriteBatch
    stored: Sequence[Stored] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class TaskDone:
    key: int
    succeeded: bool


@dataclass(frozen=True, slots=True)
class Asked:
    """there None: unknown, as the tier did not answer."""

    number: int
    chain: Chain
    there: list[bool] | None = None


Done = ReadDone | WriteDone | TaskDone | Asked


@dataclass(slots=True, eq=False)
class Reads:
    """Taken to be read, all of one rank. num_active: with these. task: to be run instead."""

    jobs: list[ReadJob]
    rank: Rank
    num_active: int
    begun_s: float
    task: Task | None = None


@dataclass(slots=True)
class Questioning:
    """Taken to be asked. asked None: whether a tier that has failed answers again."""

    asked: Asked | None


Work = Reads | WriteBatch | Questioning
