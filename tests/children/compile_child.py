"""Compiles the kernels of one module for devices that need not be there, and prints what came out, a JSON list.

Kernels are launched by their own launchers, on CPU tensors, with a driver that names a device and has none: so what is
compiled is what a launch there would compile. Run without TRITON_INTERPRET. Compiling attention takes seconds a case:
sm_80, and cases that are like others, only where a second argument says `long`.
"""

import ast
import contextlib
import importlib
import io
import json
import re
import sys
from pathlib import Path

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from kvstore.kernels.paged_batch import DeviceBatch, Scoring
from kvstore.rope.rotary import Style
from tests.support.arenas import layers_of
from tests.support.rotations import rotation

ARCHITECTURES = [80, 90]
MODELS = {  # heads, KV, head_dim
    "Llama-3.1-8B": (32, 8, 128), "Qwen-2.5-0.5B": (14, 2, 64), "Gemma-3-1B": (4, 1, 256), "many heads": (128, 1, 128),
}  # fmt: skip
BLOCK_SIZE, NUM_BLOCKS, NUM_TOKENS = 16, 5, 6


class NamedDevice:
    """As much of a driver as compiling asks for."""

    def __init__(self, architecture: int) -> None:
        self.architecture = architecture

    def get_current_device(self) -> int:
        return self.architecture

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, 32)


def tensors(heads, dtype):
    """Query, key, value of a step, key and value cache."""
    num_heads, num_kv_heads, head_dim = heads
    sizes = [(NUM_TOKENS, n, head_dim) for n in (num_heads, num_kv_heads, num_kv_heads)]
    sizes += [(NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, head_dim)] * 2
    return [torch.zeros(size, dtype=dtype) for size in sizes]


def launch_kv_triton(heads, dtype, options):
    """num_ranks: the arena has so many times the heads."""
    from kvstore.kernels.cuda import kv as kv_triton

    query, key, value, *caches = tensors(heads, dtype)
    num_ranks, options = options.get("num_ranks", 1), {k: v for k, v in options.items() if k != "num_ranks"}
    turn, positions = rotation(dtype, **{"rotary_dim": heads[2], **options}), torch.arange(NUM_TOKENS)
    arena = torch.zeros(NUM_BLOCKS, 2, 2, BLOCK_SIZE, num_ranks * heads[1], heads[2], dtype=dtype)[..., -heads[1] :, :]
    arena = layers_of(arena)
    blocks = torch.zeros(3, NUM_BLOCKS, dtype=torch.int64)
    kv_triton.write(key, value, *caches, positions)
    kv_triton.rotate_and_write(query, key, value, *caches, positions, turn.at(positions))
    layers = [(0, *caches), (1, *caches)]
    kv_triton.load(arena, layers, blocks, None)
    kv_triton.load(arena, layers, blocks, turn)
    kv_triton.save(arena, [(0, key, value)], None, positions)
    kv_triton.save(arena, [(0, key, value)], positions, positions)


def launch_attention_triton(heads, dtype, options):
    from kvstore.kernels.cuda import attention as attention_triton

    query, _, _, *caches = tensors(heads, dtype)
    decodes, table = 2, torch.zeros(3, NUM_BLOCKS, dtype=torch.int32)
    lens = torch.full((3,), NUM_TOKENS, dtype=torch.int32)
    starts = torch.tensor([0, 1, 2, NUM_TOKENS], dtype=torch.int32)
    scoring = Scoring(heads[2] ** -0.5, options.get("window"), options.get("softcap"))
    forms = [(8, NUM_TOKENS), (512, NUM_TOKENS), (512, 1 << 15)]  # the last: joined parts
    for longest_query, longest in forms[-1:] if options.get("parts") else forms:
        layout = DeviceBatch(starts, lens, table, decodes, longest_query, longest)
        attention_triton.decode(query, *caches, layout, scoring, torch.empty_like(query))
        attention_triton.prefill(query, *caches, layout, scoring, torch.empty_like(query))


LLAMA, QWEN, GEMMA, MANY = MODELS
LAUNCHES = {
    "kv": (
        launch_kv_triton,
        [
            (LLAMA, torch.bfloat16, {}),
            (LLAMA, torch.bfloat16, {"upcast": True}),
            (LLAMA, torch.bfloat16, {"style": Style.INTERLEAVED, "rotary_dim": 64}),
            (QWEN, torch.bfloat16, {}),
            (QWEN, torch.bfloat16, {"num_ranks": 2}),
            (QWEN, torch.float16, {}),
            (MANY, torch.bfloat16, {"style": Style.INTERLEAVED}),
        ],
    ),
    "attention": (
        launch_attention_triton,
        [
            (LLAMA, torch.bfloat16, {"long": True}),  # a part of what the next one is
            (LLAMA, torch.bfloat16, {"window": 4096, "softcap": 50.0}),
            (QWEN, torch.bfloat16, {"parts": True, "long": True}),  # smaller than the last one, as the next two
            (GEMMA, torch.bfloat16, {"parts": True, "long": True}),
            (LLAMA, torch.float32, {"parts": True, "long": True}),
            (GEMMA, torch.float32, {"parts": True}),
        ],
    ),
}


def real_fmas(ptx: str) -> list[str]:
    """Fused multiply-adds that round once what should be rounded twice.

    Before sm_90 bfloat16 has no product and no sum: they are written as fma with a constant, x * y - 0 or x * 1 + y.
    """
    constants = set(re.findall(r"mov\.b(?:16|32)\s+(%r\w*), -?[\dx]+\w*;", ptx))
    lines = re.findall(r"fma\.rn[.\w]*\s+([^;]*);", ptx)
    return [line for line in lines if not constants & set(line.replace(" ", "").split(",")[1:])]


def described(name: str, kernel, log: str, case: list[str]) -> dict[str, object]:
    ptx = kernel.asm["ptx"]
    return {
        "kernel": name,
        "case": case,
        "architecture": kernel.metadata.target.arch,
        "shared_bytes": kernel.metadata.shared,
        "spilled_bytes": sum(int(n) for n in re.findall(r"(\d+) bytes spill", log)),
        "reported": "spill" in log,
        "fmas": real_fmas(ptx),
        "accesses": sorted(set(re.findall(r"\b((?:ld|st)\.global[.\w]*)", ptx))),
    }


def launched(module) -> list[str]:
    """Names of the kernels that the module launches."""
    calls = [node.func for node in ast.walk(ast.parse(Path(module.__file__).read_text())) if isinstance(node, ast.Call)]
    names = {call.value.id for call in calls if isinstance(call, ast.Subscript) and isinstance(call.value, ast.Name)}
    return sorted(name for name in names if isinstance(getattr(module, name), JITFunction))


def main(module_name: str, extent: str = "short") -> None:
    found: dict[int, dict[str, object]] = {}
    run, log, case = JITFunction.run, io.StringIO(), []

    def compile_only(self, *args, grid, warmup, **options):
        start = log.tell()
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        if id(kernel) not in found:
            found[id(kernel)] = described(self.__name__, kernel, log.getvalue()[start:], case)
        return kernel

    JITFunction.run = compile_only
    launch, cases = LAUNCHES[module_name]
    with contextlib.redirect_stdout(log):
        for architecture in ARCHITECTURES:
            if module_name == "attention" and architecture < 90 and extent != "long":
                continue
            driver.set_active(NamedDevice(architecture))
            for model, dtype, options in cases:
                if (options.get("parts") and architecture < 90) or (options.get("long") and extent != "long"):
                    continue  # compiling takes seconds
                case = [model, str(dtype), *map(str, options)]
                launch(MODELS[model], dtype, options)
    names = launched(importlib.import_module(f"kvstore.kernels.cuda.{module_name}"))
    print(json.dumps({"launched": names, "compiled": list(found.values())}))


if __name__ == "__main__":
    main(*sys.argv[1:])
