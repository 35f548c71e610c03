"""Chat templates as models really have them: prefixes, trimming, reasoning, control tokens that users spell."""

import re
import time
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from kvstore.engine.text.chat_template import ChatTemplate
from kvstore.engine.text.histories import history_ids
from kvstore.errors import RequestError

LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' "
    "+ (m.content | trim) + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THINKING = (
    "{% for m in messages %}{% if m.role == 'assistant' and '</think>' in m.content %}"
    "{{ '<|im_start|>assistant\n' + m.content.split('</think>')[-1].lstrip('\n') + '<|im_end|>\n' }}{% else %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MISTRAL = (
    "{% if messages[0].role == 'system' %}{% set s = messages[0].content %}{% set ms = messages[1:] %}{% else %}"
    "{% set s = '' %}{% set ms = messages %}{% endif %}{{ '<s>' }}{% for m in ms %}{% if m.role == 'user' %}"
    "{{ '[INST]' + (s + '\n\n' if loop.last and s else '') + m.content + '[/INST]' }}{% else %}"
    "{{ m.content + '</s>' }}{% endif %}{% endfor %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
NO_SYSTEM += CHATML
CONTROLS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>",
            "[INST]", "[/INST]", "<s>", "</s>"]  # fmt: skip


def byte_level() -> Tokenizer:
    letters = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(letters))}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def metaspace() -> Tokenizer:
    """As Llama 2's: a space in front of every text that is encoded."""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,?!:<>|[]/_▁\n"
    vocab = {"<unk>": 0} | {letter: i for i, letter in enumerate(letters, start=1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return tokenizer


def words(template: str, core: Tokenizer | None = None, think: bool = False) -> Any:
    """Control tokens as most checkpoints have them: special, but not among the named ones (bos, eos, ...)."""
    core = core or byte_level()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROLS])
    if think:
        core.add_tokens([AddedToken("</think>", special=False, normalized=False)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, chat_template=template)


def make(template: str) -> ChatTemplate:
    return ChatTemplate.of(words(template))


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize("template", [LLAMA3, CHATML], ids=["llama3", "chatml"])
@pytest.mark.parametrize("history", [[], [SYSTEM]], ids=["bare", "system"])
def test_turn_by_turn_gives_the_ids_of_the_whole(template, history):
    chat = make(template)
    ids = chat.prompt_ids([*history, user("Hi")])
    messages = [*history, user("Hi")]
    for answer, question in (("Hello there.", "  How are you? "), ("Well.", "Bye\n\nnow")):
        messages.append(assistant(answer))
        ids = chat.next_ids(ids + chat.encode_answer(answer), messages, question)
        messages.append(user(question))
        assert ids == chat.prompt_ids(messages)


@pytest.mark.parametrize("template", [LLAMA3, CHATML, MISTRAL], ids=["llama3", "chatml", "mistral"])
@pytest.mark.parametrize("control", [*CONTROLS, "</think>"])
def test_no_text_of_a_user_becomes_a_control_token(template, control):
    tokenizer = words(template, think=True)
    chat = ChatTemplate.of(tokenizer)
    spell = f"a {control} b{control}"
    count = lambda ids: [ids.count(tokenizer.convert_tokens_to_ids(t)) for t in [*CONTROLS, "</think>"]]  # noqa: E731
    for messages in ([user("x")], [SYSTEM, user("x"), assistant("y"), user("z")]):
        spelled = [*messages[:-1], user(spell)]
        assert count(chat.prompt_ids(spelled)) == count(chat.prompt_ids(messages))
        assert spell in tokenizer.decode(chat.prompt_ids(spelled))
    start = chat.prompt_ids([user("x")]) + chat.encode_answer("y")
    following = chat.next_ids(start, [user("x"), assistant("y")], spell)
    if following is not None:
        assert count(following) == count(chat.next_ids(start, [user("x"), assistant("y")], "plain"))


def test_the_longest_of_thousands_of_control_tokens_is_found_at_once():
    """Gemma has 6,000 that begin alike."""
    tokenizer = words(CHATML)
    tokenizer.add_tokens(
        [f"<unused{number}>" for number in range(6000)] + ["<unused", "<unused7>>"], special_tokens=True
    )
    chat, spelled = ChatTemplate.of(tokenizer), "<unused5>>, <unused7>>, <unused7>, <unused\n"
    begun = time.process_time()
    shown = chat.text.hide_controls(spelled * 2000)
    assert time.process_time() - begun < 1
    assert "<" not in shown and chat.text.shown(shown) == spelled * 2000 and shown.count(">") == 2000


def test_a_control_token_that_is_spelled_counts_as_it_is_spelled():
    spelled, chat = "<|im_end|>" * 5, make(CHATML)
    messages = [user(spelled), assistant("x"), user("last")]
    before = len(chat.prompt_ids(messages[:1]))
    found = [chat.message_of_last(messages, chat.prompt_ids(messages)[:count]) for count in (before - 20, before + 1)]
    assert found == [0, 1]
    assert chat.using(continues=True).opening_with(assistant(spelled)).endswith(f"assistant\n{spelled}")


@pytest.mark.parametrize("template", [CHATML, THINKING], ids=["chatml", "thinking"])
def test_an_answer_that_spells_a_control_token_stays_as_it_was_generated(template):
    chat = ChatTemplate.of(words(template, think=True))
    history = [user("q"), assistant("<think>hm</think>\n\nan </s> answer")]
    asked = [*history, user("a </s>")]
    following = chat.next_ids([1], history, "a </s>")
    assert following is not None and following[0] == 1
    assert chat.prompt_ids(asked)[-len(following) + 1 :] == following[1:]
    assert history_ids(chat, asked, {1: [1]})[-len(following) :] == following


def test_a_system_prompt_that_the_template_moves_is_found_where_it_is():
    tokenizer = words(MISTRAL)
    ids = ChatTemplate.of(tokenizer).prompt_ids([SYSTEM, user("one"), assistant("two"), user("three </s>")])
    text = tokenizer.decode(ids)
    assert text == "<s>[INST]one[/INST]two</s>[INST]Be brief.\n\nthree </s>[/INST]"
    assert ids.count(tokenizer.convert_tokens_to_ids("</s>")) == 1


def test_reasoning_that_the_template_drops_is_noticed():
    chat = make(THINKING)
    plain = [user("q"), assistant("an answer")]
    assert chat.next_ids([1], plain, "next") is not None
    assert chat.next_ids([1], [user("q"), assistant("<think>hm</think>\n\nan answer")], "next") is None


def test_a_part_gets_no_space_that_the_whole_would_not_have():
    tokenizer = words(MISTRAL, metaspace())
    whole = tokenizer.backend_tokenizer.encode("[INST]a b[/INST]", add_special_tokens=False).tokens
    assert whole[:4] == ["[INST]", "▁", "a", "▁"]
    spelled = ChatTemplate.of(tokenizer).prompt_ids([user("a b [INST]")])
    tokens = tokenizer.convert_ids_to_tokens(spelled)
    assert tokens[:6] == ["<s>", "[INST]", "▁", "a", "▁", "b"]


def test_what_a_template_refuses_is_a_request_error():
    with pytest.raises(RequestError, match="System role not supported"):
        make(NO_SYSTEM).prompt_ids([SYSTEM, user("x")])
    with pytest.raises(RequestError, match="changes a message that spells a control token"):
        make("{{ messages[0].content[:30] }}").prompt_ids([user("first </s>")])


def test_no_template_is_none():
    assert ChatTemplate.of(transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level())) is None


@pytest.mark.parametrize("system", [[], [SYSTEM]], ids=["alone", "system"])
@pytest.mark.parametrize("template", [LLAMA3, CHATML, MISTRAL], ids=["llama3", "chatml", "mistral"])
def test_a_cut_at_turn_starts_is_what_the_template_says_of_the_turns_that_are_kept(template, system):
    chat = make(template)
    turns = [
        [user("First one"), assistant("Yes")],
        [user("Second, then"), assistant("No. Never")],
        [user("Third"), assistant("Ok")],
    ]
    head, end = chat.head_ids(system), chat.end_ids(bool(system))
    if template == MISTRAL and system:
        assert head is None and end is None, "it moves the system prompt into the last message"
        return
    messages, ids, starts = list(system), [], []
    for turn in turns:
        if ids:
            prompt = chat.next_ids(ids, messages, turn[0]["content"])
            assert prompt[len(ids) :][: len(end)] == end
            starts.append(len(ids) + len(end))
        else:
            prompt = chat.prompt_ids([*messages, turn[0]])
            assert prompt[: len(head)] == head
            starts.append(len(head))
        messages += turn
        ids = prompt + chat.encode_answer(turn[1]["content"])
    for kept in (1, 2):
        cut = ids[: starts[0]] + ids[starts[kept] :]
        rest = [message for turn in turns[kept:] for message in turn]
        rendered = chat.prompt_ids([*system, *rest[:-1]])
        assert cut == rendered + chat.encode_answer(rest[-1]["content"])


def test_the_head_keeps_a_system_prompt_that_spells_a_control_token_as_text():
    chat = make(LLAMA3)
    system = [{"role": "system", "content": "Never say <|eot_id|> here."}]
    head = chat.head_ids(system)
    assert chat.prompt_ids([*system, user("Hi")])[: len(head)] == head


WITH_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.reasoning_content %}"
    "{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}: {{ ARGUMENTS }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think></think>' }}{% endif %}{{ note }}{% endif %}"
)
MAPPINGS = WITH_TOOLS.replace("ARGUMENTS", "c.function.arguments | tojson")
TEXTS = WITH_TOOLS.replace("ARGUMENTS", "'json ' + c.function.arguments")
REPRS = WITH_TOOLS.replace("ARGUMENTS", "c.function.arguments")
TOOLS = [{"type": "function", "function": {"name": "f", "description": "It does f.", "parameters": {"type": "object"}}}]
ARGUMENTS = {"a": "é", "b": [1, None]}


def called(arguments=ARGUMENTS, **more):
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call], **more}


def result(text="4"):
    return {"role": "tool", "tool_call_id": "call_1", "content": text}


def text_of(template, messages):
    return words(CHATML).decode(template.prompt_ids(messages))  # the tokens are the same


@pytest.mark.parametrize(("template", "knows"), [(CHATML, False), (NO_SYSTEM, False), (MAPPINGS, True), (TEXTS, True)])
def test_whether_a_template_knows_tools_is_seen_in_what_it_shows(template, knows):
    assert make(template).knows_tools is knows


HOISTED = (
    "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "shows"),
    [(CHATML, True), ("{% for m in messages %}{{ m.content if m.role != 'system' }}{% endfor %}", False),
     (HOISTED, False), (CHATML + "{% if messages[1:] %}{{ raise_exception('first, or never') }}{% endif %}", False)],
)  # fmt: skip
def test_whether_a_template_shows_a_late_system_message_where_it_comes(template, shows):
    assert make(template).shows_late_system is shows


@pytest.mark.parametrize(("template", "shown"), [
    (MAPPINGS, 'f: {"a": "é", "b": [1, null]}'), (TEXTS, 'f: json {"a": "é", "b": [1, null]}'),
    (REPRS, 'f: {"a": "é", "b": [1, null]}'),
])  # fmt: skip
def test_arguments_are_given_as_the_template_takes_them(template, shown):
    history = [user("Four?"), called(), result()]
    text = text_of(make(template), history)
    assert f"<|im_start|>assistant\n{shown}<|im_end|>\n<|im_start|>tool\n4<|im_end|>" in text
    written = [user("Four?"), called('{"a": "é", "b": [1, null]}'), result()]
    assert text_of(make(template), written) == text


@pytest.mark.parametrize("wants_short", [True, False])
def test_ids_of_calls_are_given_as_the_template_takes_them(wants_short):
    """Mistral's refuse all but nine letters and digits. A call and its result have the same one, other calls others."""
    want = "{% if i | length != 9 %}{{ raise_exception('no') }}{% endif %}" if wants_short else ""
    template = f"{{%- macro want(i) %}}{want}{{{{ 'id ' + i + ' ' }}}}{{% endmacro %}}" + MAPPINGS.replace(
        "{{ m.content }}", "{{ m.content }}{% if m.tool_call_id %}{{ want(m.tool_call_id) }}{% endif %}"
    ).replace("{{ c.function.name }}", "{{ want(c.id) }}{{ c.function.name }}")
    ids = ["call_" + "0" * 24, "call_" + "1" * 24, "abcDEF123", "abc-EF123"]
    said = [user("Four?")]
    for call_id in ids:
        call = called()["tool_calls"][0] | {"id": call_id}
        said += [called() | {"tool_calls": [call]}, result() | {"tool_call_id": call_id}]
    shown = re.findall(r"id (\S+) ", text_of(make(template), said))
    assert shown[::2] == shown[1::2] and shown[4] == ids[2] and len(set(shown)) == 4
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", one) for one in shown) if wants_short else shown[::2] == ids


def test_arguments_that_are_no_json_are_shown_as_they_are():
    assert 'f: "{oops"' in text_of(make(MAPPINGS), [user("Four?"), called("{oops"), result()])


def test_reasoning_is_shown_under_the_name_that_the_template_has():
    history = [user("Four?"), called(reasoning_content="Hm."), result()]
    text = text_of(make(MAPPINGS), history)
    assert "<think>Hm.</think>f:" in text
    assert text_of(make(MAPPINGS.replace("reasoning_content", "thinking")), history) == text


def test_tools_and_variables_are_in_the_prompt_and_in_what_opens_the_answer():
    template = make(MAPPINGS)
    assert "It does f." in text_of(template.using(TOOLS), [user("Hi")])
    assert "It does f." not in text_of(template, [user("Hi")])
    assert template.opening == template.using(TOOLS).opening == "<|im_start|>assistant\n"
    assert template.using(kwargs={"enable_thinking": False}).opening == "<|im_start|>assistant\n<think></think>"
    assert template.using(TOOLS) is template.using(TOOLS)
    assert template.using() is template


@pytest.mark.parametrize(
    "name", ["messages", "tools", "documents", "add_generation_prompt", "chat_template", "tokenize"]
)
def test_variables_that_are_not_the_requests_are_refused(name):
    with pytest.raises(RequestError, match=f"chat_template_kwargs sets {name}; give only") as raised:
        make(MAPPINGS).using(kwargs={"mine": 1, name: 2})
    assert raised.value.param == "chat_template_kwargs"


def test_a_turn_after_tools_gives_the_ids_of_the_whole():
    template = make(MAPPINGS).using(TOOLS)
    history = [user("Four?"), called(), result(), assistant("Four.")]
    ids = template.prompt_ids(history[:-1]) + template.encode_answer("Four.")
    assert template.next_ids(ids, history, "Thanks") == template.prompt_ids([*history, user("Thanks")])


@pytest.mark.parametrize("control", ["<|im_end|>", "<|im_start|>", "</s>"])
def test_no_text_beside_contents_becomes_a_control_token(control):
    """Arguments, results, reasoning, tools and variables come from people, too."""

    def ids(word):
        tools = [{"type": "function", "function": {"name": "f", "description": word, "parameters": {word: [word]}}}]
        history = [user("Hi"), called({"a": word, word: [{"b": word}]}, reasoning_content=word), result(word)]
        return make(MAPPINGS).using(tools, {"note": word}).prompt_ids(history)

    spelled, plain, tokenizer = ids(f"x{control}y"), ids("xy"), words(CHATML)
    control_ids = set(tokenizer.added_tokens_decoder)
    assert [i for i in spelled if i in control_ids] == [i for i in plain if i in control_ids]
    assert tokenizer.decode(spelled).replace(f"x{control}y", "xy") == tokenizer.decode(plain)
