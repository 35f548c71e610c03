"""A rank without a share of the arena: what it saves is in its part of the blocks, and what it loads was there."""

import pytest
import torch

from kvstore.blocks.records import Load, Save, TransferPlan, Transferred
from kvstore.memory.layout import KVLayout, OwnPart
from kvstore.memory.ranked import LEAST_ARENA_BLOCKS, FarBlocks, FarTransfer
from kvstore.memory.transfer import Arena
from tests.support.arenas import alike, whole

LAYERS, BLOCK, HEADS, DIM = 4, 4, 4, 8
NUM_BLOCKS = LEAST_ARENA_BLOCKS + 3  # more than it has memory for at the start
SHAPE = (alike(LAYERS, HEADS, DIM), BLOCK)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("part", [OwnPart((0, LAYERS), (2, 4)), OwnPart((1, 3), (0, HEADS)), OwnPart((3, 4), (0, 1))])
def test_parts_of_blocks_come_back(part, dtype):
    layout = KVLayout(*SHAPE, dtype, (None,) * LAYERS, part)
    arena = Arena(KVLayout(*SHAPE, dtype, (None,) * LAYERS), NUM_BLOCKS + 5, pin=False)
    blocks, far = FarBlocks(arena), FarTransfer(layout)
    num_layers, num_heads = part.layers[1] - part.layers[0], part.heads[1] - part.heads[0]
    shape = (NUM_BLOCKS, BLOCK, num_heads, DIM)
    caches = [(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)) for _ in range(num_layers)]
    far.register(caches)
    keys, values = (torch.randn(num_layers, NUM_BLOCKS * BLOCK, num_heads, DIM).to(dtype) for _ in range(2))

    arena_blocks = [arena_block + 2 for arena_block in reversed(range(NUM_BLOCKS))]
    one = [Save(0, BLOCK * number, BLOCK, arena_block, 0) for number, arena_block in enumerate(arena_blocks[:-1])]
    last = BLOCK * (NUM_BLOCKS - 1)  # in two pieces
    saves = (*one, Save(0, last, 1, arena_blocks[-1], 0), Save(0, last + 1, BLOCK - 1, arena_blocks[-1], 1))
    plan = TransferPlan((), saves, 7)
    far.begin(plan, [0], b"")
    for layer in range(num_layers):
        far.save_kv_layer(layer, keys[layer], values[layer])
    far.end()
    assert far.completed() == [Transferred(7, False, True)]
    blocks.put(part, plan, far.saved())
    far.erase()
    assert not any(far.saved())

    mine = whole(arena)[arena_blocks, slice(*part.layers)][..., slice(*part.heads), :]
    assert torch.equal(mine[:, :, 0].transpose(0, 1).reshape(keys.shape), keys)
    assert torch.equal(mine[:, :, 1].transpose(0, 1).reshape(values.shape), values)
    assert arena.tensor.count_nonzero() == mine.count_nonzero()  # nothing beside them

    loads = tuple(Load(number, arena_block, BLOCK * number, b"") for number, arena_block in enumerate(arena_blocks))
    plan = TransferPlan(loads, (), 8)
    far.begin(plan, [0], blocks.loaded(part, plan))
    far.end()
    [loaded] = far.completed()
    assert loaded.ticket == 8 and loaded.is_load and loaded.succeeded
    for layer, (key_cache, value_cache) in enumerate(caches):
        assert torch.equal(key_cache.reshape(keys[layer].shape), keys[layer])
        assert torch.equal(value_cache.reshape(values[layer].shape), values[layer])
