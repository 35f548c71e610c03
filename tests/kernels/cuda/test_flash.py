"""Attention kernels of others, as far as they can be known without them: stand-ins with their signatures.

A stand-in computes from its own arguments alone, as its documentation says, so that a wrong one gives a wrong answer.
"""

import inspect
import sys
from types import ModuleType

import pytest
import torch

from kvstore.kernels import attention, reference
from kvstore.kernels.cuda import flash as attention_flash
from kvstore.kernels.paged_batch import Scoring
from tests.kernels.cuda.test_attention import Case
from tests.support.paged import SCORINGS, scoring_of

HEADS = (4, 2, 16)
REQUESTS = [(30, 1), (5, 1), (20, 20), (300, 3), (270, 40)]


def standing_in(query, key_cache, value_cache, starts, lens, table, longest, scale, causal, window_size, softcap):
    """What all of them compute. Rows of no request stay as they come: NaN."""
    assert {t.dtype for t in (starts, lens, table)} == {torch.int32}
    assert len(starts) == len(lens) + 1 == len(table) + 1 and longest >= int(starts.diff().max())
    left, right = window_size
    assert causal or right == 0, "no mask of the future"
    window = None if left < 0 else left + 1  # both ends are inclusive
    out = torch.full_like(query, float("nan"), memory_format=torch.contiguous_format)
    for i, context_len in enumerate(lens.tolist()):
        tokens = slice(int(starts[i]), int(starts[i + 1]))
        blocks = table[i, : -(-context_len // key_cache.shape[1])].long()
        key, value = (cache[blocks].flatten(0, 1)[:context_len] for cache in (key_cache, value_cache))
        out[tokens] = reference.attend(query[tokens], key, value, scale, window, softcap or None)
    return out


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
    max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
    causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
):  # fmt: skip
    return standing_in(
        q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, max_seqlen_q,
        softmax_scale, causal, window_size, softcap,
    )  # fmt: skip


def varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
    enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
):  # fmt: skip
    assert enable_gqa or query.shape[1] == key.shape[2]
    assert cu_seq_k is None and max_k >= int(seqused_k.max())
    causal = window_size == (-1, 0)
    return standing_in(
        query, key, value, cu_seq_q, seqused_k, block_table, max_q, scale, causal, window_size, softcap=None
    )


FLASH3 = ("flash_attn_interface", flash_attn_with_kvcache)
TORCH = ("torch.nn.attention.varlen", varlen_attn)


@pytest.fixture
def install(monkeypatch):
    """Puts stand-ins where packages would be; without arguments there are none."""

    def put(*stand_ins):
        for name, _ in (FLASH3, TORCH):
            monkeypatch.setitem(sys.modules, name, None)  # importing it is an ImportError
        for name, function in stand_ins:
            package = ModuleType(name)
            setattr(package, getattr(function, "named", function.__name__), function)
            monkeypatch.setitem(sys.modules, name, package)
        attention_flash.module.cache_clear()
        attention.foreign_prefill.cache_clear()

    put()
    yield put
    attention_flash.module.cache_clear()
    attention.foreign_prefill.cache_clear()


def setting(block_size=16, dtype=torch.float16, scoring=None):
    case = Case([(5, 2)], "cpu", HEADS, block_size, dtype)
    return attention._setting(case.query, case.key_cache, scoring or Scoring(0.25))


@pytest.mark.parametrize("name", SCORINGS)
@pytest.mark.parametrize("stand_in", [FLASH3, TORCH], ids=lambda stand_in: stand_in[0])
def test_decodes_by_triton_and_the_rest_by_others_equal_reference(kernel_device, install, monkeypatch, stand_in, name):
    if kernel_device != "cpu":
        pytest.skip("stand-ins are for the CPU")
    install(stand_in)
    if name in ("plain", "window") or (name == "softcap" and stand_in is not TORCH):
        monkeypatch.delattr("kvstore.kernels.cuda.attention.prefill")
    Case(REQUESTS, "cpu", HEADS, block_size=256, dtype=torch.float16).check(scoring_of(name, 4, "cpu"))


def test_each_is_used_for_what_it_can(install):
    find, chosen = attention.foreign_prefill, attention_flash
    capped = setting(256, scoring=Scoring(0.25, softcap=2.0))
    assert find(setting()) is None
    install(TORCH)
    assert find(setting()) is chosen.torch_varlen and find(capped) is None
    install(FLASH3, TORCH)
    assert find(setting(16)) is chosen.flash3 and find(capped) is chosen.flash3
    assert find(setting(dtype=torch.float32)) is None


def test_float32_and_sinks_are_tritons(kernel_device, install):
    if kernel_device != "cpu":
        pytest.skip("stand-ins are for the CPU")

    def unwanted(*arguments, **options):
        raise KeyError("called")

    unwanted.named = "flash_attn_with_kvcache"
    install(("flash_attn_interface", unwanted))
    Case([(5, 1), (20, 4)], "cpu", HEADS).check()
    Case([(5, 1), (20, 4)], "cpu", HEADS, dtype=torch.float16).check(scoring_of("sinks", 4, "cpu"))


def broken(error):
    def refuses(*arguments, **options):
        raise error

    refuses.named = "flash_attn_with_kvcache"
    return refuses


def ignores_the_window(*arguments, **options):
    return flash_attn_with_kvcache(*arguments, **{**options, "window_size": (-1, -1)})


ignores_the_window.named = "flash_attn_with_kvcache"


def test_what_does_not_work_here_is_not_used(install):
    """A build for other cards refuses, an older one has other arguments, and one may compute something else."""
    find = attention.foreign_prefill
    for error in (RuntimeError("only supports Hopper"), TypeError("unexpected keyword"), AssertionError("no")):
        install(("flash_attn_interface", broken(error)), TORCH)
        assert find(setting()) is attention_flash.torch_varlen
    install(("flash_attn_interface", ignores_the_window))
    assert find(setting(scoring=Scoring(0.25, window=5))) is None
    assert find(setting()) is attention_flash.flash3


@pytest.mark.parametrize("error", ["OSError", "RuntimeError", "ImportError"])
def test_a_package_whose_import_fails_is_as_good_as_none(install, tmp_path, monkeypatch, caplog, error):
    """Built for another torch, it may miss a symbol, a library, or an operation that it wants to register."""
    (tmp_path / "flash_attn_interface.py").write_text(f"raise {error}('libcudart.so.11: cannot open\\nmore')")
    install(TORCH)
    monkeypatch.delitem(sys.modules, "flash_attn_interface")
    monkeypatch.syspath_prepend(tmp_path)
    assert attention.foreign_prefill(setting()) is attention_flash.torch_varlen
    assert "flash_attn_interface is installed but cannot be used (libcudart.so.11: cannot open)" in caplog.text


def test_torch_takes_what_the_stand_in_takes():
    from torch.nn.attention import varlen

    if "block_table" not in inspect.signature(varlen.varlen_attn).parameters:
        pytest.skip("this torch has no block table")
    real, ours = (inspect.signature(f).parameters.values() for f in (varlen.varlen_attn, varlen_attn))
    assert [(p.name, p.kind, p.default) for p in real] == [(p.name, p.kind, p.default) for p in ours]


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("name", ["plain", "window", "softcap"])
def test_what_is_installed_here_computes_the_same(block_size, name):
    attention.foreign_prefill.cache_clear()
    requests = [(700, 1), (1500, 1500), (3000, 40)]
    Case(requests, "cuda", (32, 8, 128), block_size, torch.bfloat16).check(scoring_of(name, 32, "cuda"))
