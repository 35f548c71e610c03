"""The messages between the first rank and another one. The bytes are msgpack and never name code."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from kvstore.blocks.records import TransferPlan
from kvstore.engine.core.input_batch import Copies, StepInputs
from kvstore.engine.process import Failed, as_error
from kvstore.memory.layout import OwnPart


# -- to the first rank -------------------------------------------------------------------------------------------------
class RankLoaded(msgspec.Struct, tag=True, array_like=True):
    """The rank has read its weights and now joins the others."""


class RankReady(msgspec.Struct, tag=True, array_like=True):
    """The rank is ready for steps. It has this part of blocks."""

    part: OwnPart


class Moved(msgspec.Struct, tag=True, array_like=True):
    """The loads or saves of a step, or the saves of states, have ended for the rank's heads and layers."""

    ticket: int
    is_load: bool
    succeeded: bool
    saved: Moves | None = None  # of a rank without a share of the arena; `data` is what it has saved


# -- from the first rank -----------------------------------------------------------------------------------------------
class OpenArena(msgspec.Struct, tag=True, array_like=True):
    """The arena has its final size, which is zero without a store."""


class Moves(msgspec.Struct, array_like=True):
    """The loads and saves of a step, or the states that `SaveStates` saves."""

    plan: TransferPlan
    row_starts: Sequence[int] = ()  # first token of each scheduled request
    data: bytes = b""  # what is loaded, for a rank without a share of the arena


class RankStep(msgspec.Struct, tag=True, array_like=True):
    """What the first rank computes in a step, for another rank to compute its part of."""

    num_tokens: int
    num_requests: int
    numbers: bytes  # int64: token ids, positions, slots, query start, context lengths and sample tokens in a row
    table: bytes  # int32: the block table of the step's requests
    windows: bytes  # int32: the window slots of these blocks; empty if no layer has a window
    copies: tuple[list[tuple[int, int]], list[tuple[int, int]]]  # first of all: of HBM blocks, and of window slots
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
    """Overwrite these HBM blocks and window slots with zeros."""

    blocks: list[int]
    slots: list[int]


class SaveStates(msgspec.Struct, tag=True, array_like=True):
    """Save states, as they are behind the steps before this message."""

    moves: Moves


def step_of(
    inputs: StepInputs, table: np.ndarray, window_of: np.ndarray | None, copies: tuple[Copies, Copies],
    moves: Moves | None,
) -> RankStep:  # fmt: skip
    """The message for a step; see `Others.begin_step`."""
    arrays = (
        inputs.token_ids, inputs.positions, inputs.slots, inputs.query_start, inputs.context_lens, inputs.sample_tokens
    )  # fmt: skip
    numbers = np.concatenate(arrays).tobytes()
    windows = b"" if window_of is None else window_of[table].tobytes()
    blocks, slots = map(list, copies)
    return RankStep(len(inputs.token_ids), len(inputs.rows), numbers, table.tobytes(), windows, (blocks, slots), moves)


ToRank = OpenArena | RankStep | EndForward | Overwrite | SaveStates | Leave
FromRank = RankLoaded | RankReady | Failed | Moved
decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode
decode_from_rank = msgspec.msgpack.Decoder(FromRank, dec_hook=as_error).decode
