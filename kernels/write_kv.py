"""Writes new keys and values to the paged HBM cache, by slot mapping, and rotates queries and keys before that.

On CUDA one Triton kernel does both, on a CPU compiled code, otherwise torch operations. The bits are the same.
"""

from torch import Tensor

from kvstore.kernels import reference
from kvstore.kernels.cpu import decode as decode_native
from kvstore.kernels.cuda.triton_support import runs_kernels
from kvstore.rope.rotary import Rotation


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """As `kvstore.kernels.reference.write_kv`: [num_tokens, num_kv_heads, head_dim] each; a slot of -1 is skipped."""
    if runs_kernels(key):
        from kvstore.kernels.cuda import kv as kv_triton

        kv_triton.write(key, value, key_cache, value_cache, slots)
        return
    if key.device.type != "cpu":  # on CUDA, a slot of -1 would be an error after which the device is lost
        reference.write_kv(key, value, key_cache, value_cache, slots)
        return
    try:
        key_cache.view(-1, *key_cache.shape[2:]).index_copy_(0, slots, key)
        value_cache.view(-1, *value_cache.shape[2:]).index_copy_(0, slots, value)
    except IndexError:  # a slot of -1: only padded steps have one, and all others should not search for it
        reference.write_kv(key, value, key_cache, value_cache, slots)


def rotate_and_write(
    query: Tensor, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor,
    rotation: Rotation | None,
) -> tuple[Tensor, Tensor]:  # query and key, rotated  # fmt: skip
    """Rotate query and key by `rotation`, which has one row per token (see `Rotation.at`); write key and value.

    query: [num_tokens, num_heads, head_dim]; the rest as in `write_kv`. Rotated tensors are new. If rotation is None,
    query and key are returned as they are.
    """
    if runs_kernels(key):
        from kvstore.kernels.cuda import kv as kv_triton

        return kv_triton.rotate_and_write(query, key, value, key_cache, value_cache, slots, rotation)
    if rotation is not None:
        done = decode_native.rotate_and_write(query, key, value, key_cache, value_cache, slots, rotation)
        if done is not None:
            return done
        query, key = rotation.apply(query), rotation.apply(key)
    write_kv(key, value, key_cache, value_cache, slots)
    return query, key
