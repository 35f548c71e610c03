"""What a rank other than the first does: it loads its part of the model, then computes the steps that it receives.

It decides nothing and samples nothing.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

import numpy as np
import torch

from kvstore.blocks.records import TransferPlan
from kvstore.connector import NullConnector
from kvstore.engine.config import EngineConfig
from kvstore.engine.model.devices import num_hbm_blocks, own_device, run_all_forms
from kvstore.engine.model.interception import LayerConnector
from kvstore.engine.model.loading import load
from kvstore.engine.model.parallel.group import part_of_process
from kvstore.engine.model.probe import intercept
from kvstore.engine.model.step.runner import HBMCaches
from kvstore.engine.model.step.tensors import step_tensors
from kvstore.engine.process import Channel, Failed, Heart, Start, encode
from kvstore.engine.ranks.wire import (
    EndForward,
    Leave,
    Moved,
    Moves,
    OpenArena,
    Overwrite,
    RankLoaded,
    RankReady,
    RankStep,
    SaveStates,
    ToRank,
    decode_to_rank,
)
from kvstore.memory.ranked import DataPlane, FarTransfer, rank_transfer


def follow(start: Start, heart: Heart, channel: Channel) -> int:
    """Compute steps until the first rank ends, or this rank fails. Returns the exit code, which is 0 if the first rank
    has said that it ends.
    """

    def fail(error: Exception) -> None:
        try:
            channel.send_all(encode(Failed(error)))
        finally:
            print(f"kvstore: {start.name}: {error}", file=sys.stderr, flush=True)

    try:
        follower = Follower(start, channel, fail)
        while follower.go_on(heart):
            pass
    except Exception as error:
        fail(error)
        return 1
    return 0 if follower.has_left else 1


class Follower:
    """Owns this rank's HBM pool and its model. fail: tells why the rank ends."""

    def __init__(self, start: Start, channel: Channel, fail: Callable[[Exception], None]) -> None:
        self._channel, self._messages, self._fail = channel, list[ToRank](), fail
        self._telling = threading.Lock()  # of the transfers that have ended, in order
        self.has_left = False  # because the first rank said so
        config = EngineConfig.of(start.arguments)
        host = None if start.arena is not None else channel.socket.getsockname()[0]  # for the other ranks, elsewhere
        device = own_device(config, start.rank)
        part = part_of_process(start.rank, config.tensor_parallel_size, config.pipeline_parallel_size, device)
        loaded = load(config.model, device, config.dtype, config.max_model_len, revision=config.revision, part=part)
        if loaded.device.type == "cuda":
            torch.cuda.set_device(loaded.device)
        channel.send_all(encode(RankLoaded()))
        part.join(start.rendezvous, host)
        self._model = intercept(loaded.model, loaded.max_model_len, pack=True, part=part)
        self._block_size = config.block_size
        limits = config.scheduler(loaded.max_model_len)
        has_store = bool(config.tiers.cpu or config.tiers.disk)
        num_blocks, num_slots = num_hbm_blocks(
            self._model, limits, config.tiers.hbm, False, has_store, config.num_processes
        )
        self._hbm = HBMCaches(self._model, num_blocks, config.block_size, num_slots)
        self._window_of = np.zeros(num_blocks, np.int32) if num_slots else None  # of the blocks of the last steps
        self._transfer: DataPlane | FarTransfer | None = None
        self._moves: Moves | None = None  # of the step that is computed
        opened = self._next()
        if not isinstance(opened, OpenArena):  # the first rank could not start, or ends
            self.has_left = isinstance(opened, Leave)
            return
        layout = self._model.layout(config.block_size)
        if has_store:
            if start.arena is None:
                self._transfer = FarTransfer(layout)
            else:
                self._transfer = rank_transfer(layout, start.arena, loaded.device, self._tell_or_end)
            self._transfer.register(self._hbm.of(windowed=False), self._hbm.windows)
        self._connector: LayerConnector = self._transfer or NullConnector()
        assert layout.own is not None
        channel.send_all(encode(RankReady(layout.own)))
        if loaded.device.type == "cuda":  # the first rank does the same now
            run_all_forms(self._model, self._hbm.layers, limits)

    def _next(self) -> ToRank | None:
        """Wait for a message of the first rank; None when it has closed the channel."""
        while not self._messages:
            if self._channel.ended:
                return None
            self._channel.poll(-1)
            self._messages += [decode_to_rank(message) for message in self._channel.receive()]
        return self._messages.pop(0)

    def go_on(self, heart: Heart) -> bool:
        """Carry out one message. Returns False when the first rank has closed the channel."""
        heart.rest()
        message = self._next()
        heart.begin()
        if isinstance(message, RankStep):
            self._compute(message)
        elif isinstance(message, EndForward):
            self._end(message.num_samples)
        elif isinstance(message, Overwrite):
            self._hbm.overwrite(message.blocks, message.slots)
            if isinstance(self._transfer, FarTransfer):
                self._transfer.erase()
        elif isinstance(message, SaveStates):
            self._save_states(message.moves)
        self.has_left = self.has_left or isinstance(message, Leave)
        return message is not None and not self.has_left

    @torch.inference_mode()
    def _compute(self, step: RankStep) -> None:
        inputs, table = step.inputs()
        self._hbm.copy(*step.copies)
        if self._window_of is not None:
            self._window_of[table] = np.frombuffer(step.windows, np.int32).reshape(table.shape)
        self._moves = step.moves
        if step.moves is not None:
            self._begin(step.moves)
        tensors = step_tensors(inputs, table, self._block_size, self._model.device, self._window_of)
        self._model.begin(
            tensors.token_ids, tensors.positions, tensors.batch, self._hbm.layers, self._connector,
            tensors.sample_tokens,
        )  # fmt: skip
        if self._transfer is not None:
            self._transfer.end()
            self._tell()
        self._moves = None

    def _tell(self) -> None:
        """Tell the first rank which loads and saves have ended."""
        with self._telling:
            for done in () if self._transfer is None else self._transfer.completed():
                moved = Moved(done.ticket, done.is_load, done.succeeded)
                if isinstance(self._transfer, FarTransfer) and self._moves is not None and not done.is_load:
                    moved.saved = Moves(TransferPlan((), self._moves.plan.saves), data=self._transfer.saved())
                self._channel.send_all(encode(moved))

    def _tell_or_end(self) -> None:
        """The same, in the thread that waits for a device. If only that thread ended, the first rank would wait for its
        word for ever.
        """
        try:
            self._tell()
        except Exception as error:
            try:
                self._fail(error)
            finally:
                os._exit(1)

    @torch.inference_mode()
    def _end(self, num_samples: int) -> None:
        self._model.end(num_samples)

    def _save_states(self, moves: Moves) -> None:
        assert self._transfer is not None
        if isinstance(self._transfer, FarTransfer):
            moves.data = self._transfer.saved_states(moves.plan)
            moved = Moved(moves.plan.ticket, is_load=False, succeeded=True, saved=moves)
            self._channel.send(encode(moved))  # the next step does not wait until all of it is on its way
        else:
            self._transfer.save_states(moves.plan)
            self._tell()

    def _begin(self, moves: Moves) -> None:
        assert self._transfer is not None
        if isinstance(self._transfer, FarTransfer):
            self._transfer.begin(moves.plan, moves.row_starts, moves.data)
        else:
            self._transfer.begin(moves.plan, moves.row_starts)
