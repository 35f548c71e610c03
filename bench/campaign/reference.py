"""What an engine without tiers answers, each prompt alone and computed anew; and the tiny models of a campaign."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.campaign.talks import TOOLS, Talk, Told, without_ids
from kvstore.engine.builtin import MODEL_DIR

TIE = 1e-4  # of two log probabilities: another order of sums may choose either token
_SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 1024, "bos_token_id": None, "pad_token_id": None,
    "initializer_range": 0.15,  # larger than usual, so that attention is far from uniform
}  # fmt: skip
_STATES = {
    "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
_WINDOWS = {
    "num_hidden_layers": 3, "layer_types": ["sliding_attention"] * 2 + ["full_attention"], "sliding_window": 24,
}  # fmt: skip


def save_model(kind: str, folder: Path) -> str | None:
    """A random model of this kind in the folder, made once: "states" is like Qwen 3.5, "windows" like Gemma 3. "plain"
    is the built-in model, None.
    """
    if kind == "plain":
        return None
    if not folder.exists():
        import torch
        import transformers

        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        torch.manual_seed(0)
        tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL_DIR)
        sizes: dict[str, Any] = {**_SIZES, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
        config = (
            transformers.Qwen3_5TextConfig(**sizes, **_STATES)
            if kind == "states"
            else transformers.Gemma3TextConfig(**sizes, **_WINDOWS)
        )
        made = folder.with_suffix(".part")
        transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(made)
        tokenizer.save_pretrained(made)
        made.rename(folder)
    return str(folder)


class Reference:
    """Goes through a conversation as its client did, turn by turn. Each turn of each conversation is computed once."""

    def __init__(self, model: str | None, window: int) -> None:
        from kvstore import CacheTiers, Engine

        self._engine = Engine(model, CacheTiers("64MiB"), device="cpu", dtype="float32", max_model_len=window)
        self._chats: dict[str, Any] = {}

    def close(self) -> None:
        self._engine.close()

    def forget(self, name: str) -> None:
        if self._chats.pop(name, None) is not None:
            self._engine.admin.delete_session(name)

    def check(self, talk: Talk) -> tuple[int, int]:
        """Compare what was told since the last time. Returns the number of answers that were the same, and of those
        where two tokens were as good, which end the comparison.

        Raises AssertionError for a wrong answer. A conversation whose KV was re-encoded is not compared any further.
        """
        num_same = 0
        for number in range(self._num_turns(talk), len(talk.turns)):
            turn = talk.turns[number]
            if not talk.is_exact or turn.is_reencoded:
                talk.is_exact = False
                break
            if turn.edit:
                self._chats[talk.name].edit(turn.edit["edits"], turn.edit["reuse"])
                continue
            expected, least_gap = self._answer(talk, turn)
            if without_ids(expected) == without_ids(turn.answer):
                num_same += not turn.is_compared
                turn.is_compared = True
                continue
            if least_gap < TIE:
                talk.is_exact = False
                return num_same, 1
            told = f"turn {number + 1} of {talk.name}, {turn.said}, got {turn.answer}"
            raise AssertionError(f"a wrong answer: {told}; an engine without tiers says {expected}")
        return num_same, 0

    def _num_turns(self, talk: Talk) -> int:
        return self._chats[talk.name].num_turns if talk.name in self._chats else 0

    def _answer(self, talk: Talk, turn: Told) -> tuple[dict[str, Any], float]:
        """The answer, and how much better its tokens were than any other, at the least."""
        from kvstore import SamplingParams
        from kvstore.engine.text.prompts import AnswerOptions

        engine = self._engine
        chat = self._chats.get(talk.name)
        if chat is None:
            chat = engine.chat(talk.name, system=talk.system, truncation_reuse="exact")
            self._chats[talk.name] = chat
        engine.loop.call(engine.loop.pool.evict_all)
        params = SamplingParams(
            max_tokens=turn.max_tokens, temperature=0.0, ignore_eos=not turn.must_call, logprobs=2
        )  # fmt: skip
        options = AnswerOptions(TOOLS, "required") if turn.must_call else ()
        choice = chat.send(self._said(chat, turn), params, options).choices[0]
        gaps = [_gap(one.top) for one in choice.logprobs or ()]
        return choice.message, min(gaps, default=0.0)

    @staticmethod
    def _said(chat: Any, turn: Told) -> list[dict[str, Any]]:
        """Results of calls name those of this engine, whose ids are its own."""
        own = [call["id"] for call in chat.messages[-1].get("tool_calls", ())] if chat.messages else []
        results = iter(own)
        return [
            {**message, "tool_call_id": next(results)} if message["role"] == "tool" else message
            for message in turn.said
        ]


def _gap(top: dict[int, float]) -> float:
    best, *others = sorted(top.values(), reverse=True)
    return best - max(others, default=float("-inf"))
