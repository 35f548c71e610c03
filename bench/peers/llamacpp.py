"""llama.cpp in a worker process. Every conversation has its own sequence, kept in memory or in a state file.

Runs in the peer's environment, which needs llama-cpp-python, and gguf, torch and safetensors to convert the model.
"""

import ctypes
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from safetensors.torch import load_file

from bench.peers.embedded import work
from bench.peers.load import Answer

NUM_SEQUENCES, WINDOW, BATCH_TOKENS = 16, 4096, 2048
TENSORS = {  # Hugging Face's names and those of GGUF
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def convert(model: Path, path: Path) -> None:
    """A Llama or Qwen 2 as GGUF in bf16, norms and biases in float32, without a vocabulary."""
    config = json.loads((model / "config.json").read_text())
    kind, num_heads = config["model_type"], config["num_attention_heads"]
    writer = gguf.GGUFWriter(path, kind)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    heads = {"attn_q": num_heads, "attn_k": config["num_key_value_heads"]} if kind == "llama" else {}
    for name, tensor in load_file(model / "model.safetensors").items():
        values, target = tensor.float().numpy(), _tensor_name(name)
        if (short := target.split(".")[-2]) in heads:
            values = _interleaved(values, heads[short])
        if values.ndim == 1:
            writer.add_tensor(target, values)
        else:
            bf16 = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(target, gguf.quants.quantize(values, bf16), raw_dtype=bf16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensor_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)  # "weight" or "bias"
    if stem in OUTER:
        return f"{OUTER[stem]}.{kind}"
    _, _, layer, short = stem.split(".", 3)
    return f"blk.{layer}.{TENSORS[short]}.{kind}"


def _interleaved(values: "np.ndarray[Any, Any]", num_heads: int) -> "np.ndarray[Any, Any]":
    """Order the rows of a head as llama.cpp rotates a Llama: pairs side by side instead of halves."""
    rows = values.reshape(num_heads, 2, len(values) // num_heads // 2, *values.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(values.shape))


@dataclass(slots=True)
class Place:
    """A conversation's place in the cache."""

    number: int
    tokens: list[int]  # whose KV is there


class LlamaCpp:
    def __init__(self, model: Path, folder: Path, threads: int) -> None:
        self._folder = folder
        if not (path := folder / "model.gguf").exists():
            convert(model, path)
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        loaded = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        wanted = llama_cpp.llama_context_default_params()
        wanted.n_ctx, wanted.n_seq_max, wanted.n_batch = NUM_SEQUENCES * WINDOW, NUM_SEQUENCES, BATCH_TOKENS
        wanted.n_threads = wanted.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(loaded, wanted)
        if not self._context:
            raise RuntimeError(f"llama.cpp does not run {path}")
        self._memory = llama_cpp.llama_get_memory(self._context)
        vocabulary = llama_cpp.llama_model_get_vocab(loaded)
        self._vocab_size = int(llama_cpp.llama_vocab_n_tokens(vocabulary))
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        self._free = list(range(NUM_SEQUENCES))
        self._kept: dict[str, Place] = {}

    def ask(self, prompts: list[list[int]], max_tokens: int, talk: str) -> list[Answer]:
        started = time.perf_counter()
        places = [self._place(talk) for _ in prompts]
        num_cached = len(places[0].tokens)
        new = [prompt[num_cached:] for prompt in prompts]
        chosen: list[list[int]] = [[] for _ in prompts]
        ttft_s = 0.0
        for _ in range(max_tokens):
            found = self._step(places, new)
            for ids, token in zip(chosen, found, strict=True):
                ids.append(token)
            new = [[token] for token in found]
            ttft_s = ttft_s or time.perf_counter() - started
        end_s = time.perf_counter() - started
        if talk:
            self._kept[talk] = places[0]
        else:
            for place in places:
                self._release(place)
        return [Answer(ttft_s, end_s, ids, num_cached) for ids in chosen]

    def _step(self, places: Sequence[Place], new: Sequence[list[int]]) -> list[int]:
        """Compute new tokens of each sequence. Returns the most likely next token of each."""
        flat = [
            (token, len(place.tokens) + offset, place.number, offset == len(tokens) - 1)
            for place, tokens in zip(places, new, strict=True) for offset, token in enumerate(tokens)
        ]  # fmt: skip
        found = []
        for start in range(0, len(flat), BATCH_TOKENS):
            chunk = flat[start : start + BATCH_TOKENS]
            self._batch.n_tokens = len(chunk)
            for index, (token, position, number, is_last) in enumerate(chunk):
                self._batch.token[index], self._batch.pos[index] = token, position
                self._batch.n_seq_id[index], self._batch.seq_id[index][0] = 1, number
                self._batch.logits[index] = is_last
            if code := llama_cpp.llama_decode(self._context, self._batch):
                raise RuntimeError(f"llama_decode returned {code}")
            found += [self._likeliest(index) for index, one in enumerate(chunk) if one[3]]
        for place, tokens in zip(places, new, strict=True):
            place.tokens += tokens
        return found

    def _likeliest(self, index: int) -> int:
        pointer = llama_cpp.llama_get_logits_ith(self._context, index)
        return int(np.ctypeslib.as_array(pointer, (self._vocab_size,)).argmax())

    def _place(self, talk: str) -> Place:
        if talk in self._kept:
            return self._kept[talk]
        place = Place(self._free.pop(), [])
        if talk and (path := self._path(talk)).exists():
            tokens, count = (llama_cpp.llama_token * WINDOW)(), ctypes.c_size_t()
            arguments = (str(path).encode(), place.number, tokens, WINDOW, ctypes.byref(count))
            if not llama_cpp.llama_state_seq_load_file(self._context, *arguments):
                raise RuntimeError(f"llama.cpp does not load {path}")
            place.tokens = list(tokens[: count.value])
        return place

    def _release(self, place: Place) -> None:
        llama_cpp.llama_memory_seq_rm(self._memory, place.number, -1, -1)
        self._free.append(place.number)

    def leave(self, talk: str, keep: bool) -> None:
        place = self._kept.pop(talk)
        if keep:
            tokens = (llama_cpp.llama_token * len(place.tokens))(*place.tokens)
            arguments = (str(self._path(talk)).encode(), place.number, tokens, len(place.tokens))
            if not llama_cpp.llama_state_seq_save_file(self._context, *arguments):
                raise RuntimeError(f"llama.cpp does not save {self._path(talk)}")
        self._release(place)

    def _path(self, talk: str) -> Path:
        return self._folder / f"{hashlib.sha256(talk.encode()).hexdigest()[:16]}.state"

    def close(self) -> None:
        """Nothing to do: everything that must outlive the process is already in files."""


if __name__ == "__main__":
    work(LlamaCpp)
