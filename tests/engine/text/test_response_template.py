"""Which family a chat template belongs to, and that its data agree with one another."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken

from kvstore.engine.text import response_template
from kvstore.engine.text.response_template import ResponseTemplate, choose_template
from kvstore.errors import ConfigError

FOLDER = Path(response_template.__file__).parent / "response_templates"
DATA = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))}
FAMILIES = [name for name, data in DATA.items() if "calls" in data]  # the others have reasoning only


def tokenizer(text, special=(), own=None):
    tokens = {i: AddedToken(content, special=True) for i, content in enumerate(special)}
    tokens[len(tokens)] = AddedToken("</think>", special=False)
    return SimpleNamespace(chat_template=text, added_tokens_decoder=tokens, response_template=own)


def shown(name):
    """A text that stands for a chat template of the family."""
    return " ".join([*DATA[name]["marks"], *DATA[name].get("reasoning", [])])


def family(name):
    template = choose_template(tokenizer(shown(name)))
    assert template.spec == DATA[name]["response_template"]
    return template


def written(syntax, calls):
    """Calls as the family's syntax says that they are written."""
    texts = []
    for name, arguments in calls:
        if syntax.arguments == "json":
            text = json.dumps(arguments)
        elif syntax.arguments == "python":
            text = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        elif syntax.arguments == "gemma":
            shown = {k: f'<|"|>{v}<|"|>' if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
            text = "{" + ",".join(f"{key}:{value}" for key, value in shown.items()) + "}"
        else:
            text = "".join(
                syntax.parameter.replace("{key}", k).replace("{value}", v if isinstance(v, str) else json.dumps(v))
                for k, v in arguments.items()
            )
        texts.append(syntax.begin.replace("{name}", name) + text + syntax.end)
    assert len(texts) == 1 or syntax.separator is not None
    return syntax.opener + (syntax.separator or "").join(texts) + syntax.closer


@pytest.mark.parametrize("name", DATA)
def test_a_family_is_chosen_by_the_text_of_the_chat_template(name):
    assert (
        choose_template(tokenizer(f"{{% if tools %}}{shown(name)}{{% endif %}}")).spec
        == DATA[name]["response_template"]
    )


def test_a_template_of_no_family_gives_none():
    assert choose_template(tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}")) is None
    assert choose_template(tokenizer(None)) is None


def test_a_name_overrides_the_text():
    assert choose_template(tokenizer(shown("granite")), "hermes").spec == DATA["hermes"]["response_template"]
    assert choose_template(tokenizer("nothing"), "qwen3_xml").spec == DATA["qwen3_coder"]["response_template"]
    assert choose_template(tokenizer(shown("mistral_v11")), "mistral").spec == DATA["mistral_v11"]["response_template"]
    assert choose_template(tokenizer("nothing"), "mistral").spec == DATA["mistral_v11"]["response_template"]
    with pytest.raises(
        ConfigError, match=r"tool_call_parser is 'hermis'; give one of deepseek_v3, .*hermes.*qwen3_xml"
    ):
        choose_template(tokenizer("nothing"), "hermis")


def test_a_tokenizers_own_template_comes_before_ours_but_not_before_a_name():
    own = {"start_anchor": "a", "fields": {"content": {}}}
    assert choose_template(tokenizer("nothing", own=own)) == ResponseTemplate(own)
    chosen = choose_template(tokenizer(shown("hermes"), own=own))
    assert chosen == replace(family("hermes"), spec=own)
    assert choose_template(tokenizer(shown("hermes"), own=own), "hermes") == family("hermes")


def test_a_model_whose_template_shows_no_reasoning_does_not_reason():
    assert choose_template(tokenizer("<tool_call></tool_call>")).reasoning is None
    assert family("hermes").reasoning == ("<think>", "</think>")


def test_special_tokens_that_delimit_are_shown_and_no_others():
    special = ["<|im_end|>", "[TOOL_CALLS]", "[ARGS]", "<s>", "[INST]"]
    assert choose_template(tokenizer(shown("mistral_v11"), special)).shown_tokens == {1: "[TOOL_CALLS]", 2: "[ARGS]"}
    special = ["<|tool_call>", '<|"|>', "<turn|>"]
    assert choose_template(tokenizer(shown("gemma4"), special)).shown_tokens == {0: "<|tool_call>", 1: '<|"|>'}


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_begin_with_their_trigger(name):
    syntax = family(name).calls
    assert (syntax.opener + syntax.begin).startswith(syntax.trigger)
    assert "{name}" in syntax.begin
    assert ("{key}" in syntax.parameter and "{value}" in syntax.parameter) == (syntax.arguments == "parameters")
