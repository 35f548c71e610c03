"""The text part of a model. Of one that also sees or hears, nothing else is built or read."""

from __future__ import annotations

from functools import cache
from typing import Any

import transformers
from torch import Tensor, nn
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

# From the names in the files, in today's form and in that of transformers 4, to those of a text model alone.
WEIGHT_NAMES = {
    r"^(?:model\.language_model|language_model\.model|model\.text_model)\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}


def text_part(config: Any) -> tuple[type[Any], Any] | None:
    """The class of a causal language model and its configuration; None if there is no text in it, or no decoder."""
    text = config.get_text_config(decoder=True)
    if text is not config:
        for name in ("tie_word_embeddings", "eos_token_id"):
            value = getattr(config, name, None)
            if value is not None:
                setattr(text, name, list(value) if isinstance(value, tuple) else value)
    if type(text) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(text)], text
    if type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and type(text) in transformers.MODEL_MAPPING:
        return _with_head(transformers.MODEL_MAPPING[type(text)]), text
    return None


@cache
def _with_head(decoder: type[Any]) -> type[Any]:
    """A causal language model of a decoder for which transformers has none without pictures."""

    family: Any = decoder.__bases__[0]

    class TextForCausalLM(family, GenerationMixin):
        config_class = decoder.config_class
        base_model_prefix = "model"
        _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = decoder(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(self, logits_to_keep: int | Tensor = 0, **inputs: Any) -> CausalLMOutputWithPast:
            hidden = self.model(**inputs).last_hidden_state
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            return CausalLMOutputWithPast(logits=self.lm_head(hidden[:, kept]))

    TextForCausalLM.__name__ = TextForCausalLM.__qualname__ = decoder.__name__.removesuffix("Model") + "ForCausalLM"
    return TextForCausalLM
