"""The messages between the first rank and another one. The bytes are msgpack and never name code."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from kvstore.blocks.records import Load, Save, TransferPlan
from kvstore.engine.core.input_batch import StepInputs
from kvstore.engine.process import Failed, as_error


# -- to the first rank -------------------------------------------------------------------------------------------------
class RankLoaded(msgspec.Struct, tag=True, array_like=True):
    """The rank has read its weights and now joins the others."""


class RankReady(msgspec.Struct, tag=True, array_like=True):
    """The rank is ready for steps. It has these layers and KV heads, [start, stop)."""

    layers: tuple[int, int]
    heads: tuple[int, int]


class Moved(msgspec.Struct, tag=True, array_like=True):
    """The loads or saves of a step have ended for the rank's heads."""

    ticket: int
    is_load: bool
    succeeded: bool
    saves: list[tuple[int, int, int, int, int]] = []  # of a rank without a share of the arena: the fields of `Save`
    data: bytes = b""  # and what it has saved


# -- from the first rank -----------------------------------------------------------------------------------------------
class OpenArena(msgspec.Struct, tag=True, array_like=True):
    """The arena has its final size, which is zero without a store."""


class Moves(msgspec.Struct, array_like=True):
    """The loads and saves of a step; see `TransferPlan`."""

    ticket: int
    loads: list[tuple[int, int, int]]  # block number, arena block, position
    saves: list[tuple[int, int, int, int, int]]  # the fields of `Save`
    row_starts: list[int]  # first token of each scheduled request
    data: bytes = b""  # the blocks of the loads, for a rank without a share of the arena

    def plan(self) -> TransferPlan:
        loads = tuple(Load(number, arena_block, position, b"") for number, arena_block, position in self.loads)
        return TransferPlan(loads, tuple(Save(*save) for save in self.saves), self.ticket)


class RankStep(msgspec.Struct, tag=True, array_like=True):
    """What the first rank computes in a step, for another rank to compute its part of."""

    num_tokens: int
    num_requests: int
    numbers: bytes  # int64: token ids, positions, slots, query start, context lengths and sample tokens in a row
    table: bytes  # int32: the block table of the step's requests
    copies: list[tuple[int, int]]  # HBM blocks to copy before anything else: source, destination
    moves: Moves | None

    def inputs(self) -> tuple[StepInputs, np.ndarray]:
        """The step's arrays, without those about rows of the batch, and its block table."""
        numbers = np.frombuffer(bytearray(self.numbers), np.int64)
        tokens, requests = self.num_tokens, self.num_requests
        ends = np.cumsum([tokens, tokens, tokens, requests + 1, requests])
        ids, positions, slots, query_start, context_lens, samples = np.split(numbers, ends)
        none = np.zeros(requests, np.int64)
        table = np.frombuffer(self.table, np.int32).reshape(requests, -1)
        return StepInputs(ids, positions, slots, query_start, context_lens, none, samples, none[:0], none), table


class EndForward(msgspec.Struct, tag=True, array_like=True):
    """The rows of the oldest step are on their way from the last stage. For ranks of the first stage."""

    num_samples: int


class Leave(msgspec.Struct, tag=True, array_like=True):
    """The engine is closed; the rank ends in order."""


class Overwrite(msgspec.Struct, tag=True, array_like=True):
    """Overwrite these HBM blocks with zeros."""

    blocks: list[int]


def moves_of(plan: TransferPlan, row_starts: Sequence[int]) -> Moves:
    loads = [(load.block_number, load.arena_block, load.position) for load in plan.loads]
    saves = [(save.scheduled, save.first, save.num_tokens, save.arena_block, save.offset) for save in plan.saves]
    return Moves(plan.ticket, loads, saves, list(row_starts))


def step_of(
    inputs: StepInputs, block_table: np.ndarray, block_size: int, copies: Sequence[tuple[int, int]], moves: Moves | None
) -> RankStep:
    """The message for a step. block_table: of all rows of the batch."""
    arrays = (
        inputs.token_ids, inputs.positions, inputs.slots, inputs.query_start, inputs.context_lens, inputs.sample_tokens
    )  # fmt: skip
    width = -(-int(inputs.context_lens.max()) // block_size)
    table = block_table[inputs.rows, :width]
    numbers = np.concatenate(arrays).tobytes()
    return RankStep(len(inputs.token_ids), len(inputs.rows), numbers, table.tobytes(), list(copies), moves)


ToRank = OpenArena | RankStep | EndForward | Overwrite | Leave
FromRank = RankLoaded | RankReady | Failed | Moved
decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode
decode_from_rank = msgspec.msgpack.Decoder(FromRank, dec_hook=as_error).decode
