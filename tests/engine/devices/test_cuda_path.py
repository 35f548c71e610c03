"""An engine on the way that a CUDA device takes, on a CPU: packed for it, by Triton's kernels in the interpreter, with
decode steps that are replayed, and loads and saves in queues. What a device adds is that these run at once.
"""

import importlib.util
import os

import pytest
import torch

from kvstore.engine.model.packing import pack_for_cuda
from kvstore.engine.model.step.runner import ModelRunner
from kvstore.kernels.block_copy import BlockLoad
from kvstore.memory.device_transfer import DeviceTransfer
from kvstore.memory.streams import Queue
from kvstore.store.tiered import TieredConnector
from tests.support.engines import (
    Plain,
    ask,
    cached,
    counters,
    evict_cpu,
    greedy,
    open_engine,
    save_model,
    settle,
    tokens,
)
from tests.support.replaying import Rerun

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="no interpreter of kernels: Triton is missing, or compiles for the device that is here",
)


class Reached:
    """An event of queues in which everything is done at once."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def seconds_until(self, end: "Reached") -> float:
        return 0.01


class AtOnce:
    """`kvstore.memory.streams.Streams` without a device."""

    def record(self, queue: Queue) -> Reached:
        return Reached()

    def wait(self, queue: Queue, event: Reached) -> None:
        pass

    def launch(self, queue: Queue, work) -> None:
        with torch.inference_mode():
            work()


class Replayed(Rerun):
    """Over the tensors of the capture alone: kernels ask for no list of the host."""

    def capture(self, work, tensors):
        work(tensors)

        def replay():
            self.count(tensors)
            return work(tensors)

        return replay


def go_the_way_of_cuda(monkeypatch) -> Replayed:
    """From now on CPU engines do; returns who replays their steps."""
    from kvstore.kernels.cuda import kv as kv_triton
    from tests.support import interpreted

    interpreted.repair()
    for module in ("write_kv", "attention", "block_copy"):
        monkeypatch.setattr(f"kvstore.kernels.{module}.runs_kernels", lambda tensor: True)
    monkeypatch.setattr(BlockLoad, "load_layers", BlockLoad.load_by_kernel)
    monkeypatch.setattr("kvstore.memory.device_transfer.LAYERS_AHEAD", 1)
    monkeypatch.setattr("kvstore.memory.device_transfer.save_to_arena", kv_triton.save)
    monkeypatch.setattr("kvstore.kernels.attention._foreign_prefill", lambda setting: None)
    monkeypatch.setattr("kvstore.engine.model.probe.pack_for_cpu", pack_for_cuda)
    monkeypatch.setattr("kvstore.engine.model.probe.lean_layers", lambda *_: 0)
    monkeypatch.setattr(
        TieredConnector, "_make_transfer", lambda self, device: DeviceTransfer(self._arena, AtOnce(), self._wake)
    )
    monkeypatch.setattr("kvstore.memory.device_transfer.GROUP_BYTES", 1)  # a save per layer, as of long steps
    monkeypatch.setattr("kvstore.engine.model.probe._NUM_TOKENS", 6)  # the interpreter is slow
    monkeypatch.setattr("kvstore.engine.model.probe._CHUNKS", (3, 2, 1))
    capturer = Replayed()
    monkeypatch.setattr("kvstore.engine.engine.ModelRunner", lambda *parts: ModelRunner(*parts[:4], capturer))
    return capturer


SMALL = {"num_hidden_layers": 2}
MODELS = {
    "Llama": SMALL,
    "Gemma3": {**SMALL, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9},
}


@pytest.mark.parametrize("name", MODELS)
def test_the_same_tokens_from_every_tier(name, tmp_path, monkeypatch):
    model = save_model(tmp_path / "model", name, **MODELS[name])
    plain, histories = Plain(model, block_size=4), [tokens(1, 14), tokens(2, 6)]
    answers = [plain(history, 3) for history in histories]
    nexts = [[*history, *answer] for history, answer in zip(histories, answers, strict=True)]
    expected = [plain(history, 2) for history in nexts]
    plain.engine.close()
    capturer = go_the_way_of_cuda(monkeypatch)
    options = {"block_size": 4, "max_model_len": 32, "max_num_seqs": 2, "max_num_batched_tokens": 9}
    with open_engine(model, tmp_path / "store", **options) as engine:
        outputs = engine.generate(histories, [greedy(3)] * 2)
        assert [output.token_ids for output in outputs] == answers and capturer.num_replays.total() > 3
        for tier in (1, 2):
            settle(engine)
            engine.loop.pool.evict_all()
            if tier == 2:
                evict_cpu(engine)
            for history, answer in zip(nexts, expected, strict=True):
                output = ask(engine, history, 2)
                assert output.token_ids == answer and cached(output)[tier] == (len(history) - 1) // 4 * 4
        assert counters(engine)["load_failures"] == 0 and counters(engine)["dropped_saves"] == 0
