"""A chat template of a model that reasons, for the built-in one, and answers of it that are forced."""

from typing import Any
from unittest import mock

from kvstore.engine.text.language import Language

# As DeepSeek R1's and Qwen 3's: the prompt opens the reasoning, and what was reasoned before is not shown again.
HEAD = "<|bos|>{% if reasoning_effort is defined %}{{ '<|system|> Effort: ' + reasoning_effort }}<|end|>{% endif %}"
SHOWN = "{{ '<|' + m.role + '|>' + m.content.split('</think>')[-1] + '<|end|>' }}"
OPENING = (
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think></think>' }}{% else %}{{ '<think>' }}{% endif %}{% endif %}"
)
THINKING = f"{HEAD}{{% for m in messages %}}{SHOWN}{{% endfor %}}{OPENING}"
THOUGHT = {"structured_outputs": {"regex": "[a-d]{40}</think>(yes|no)"}, "max_tokens": 60}


def as_asked() -> Any:
    """In here what an answer must match holds for its reasoning, too, which is free otherwise."""
    return mock.patch.object(Language, "constrained", lambda self, params, options=None: params)
