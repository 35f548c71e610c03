"""Grammars of answers by what a request wants: reasoning before, calls by name, arguments that stand by themselves."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvstore import AnswerOptions, RequestError, SamplingParams, StructuredOutputsParams
from kvstore.engine.text.answer_parser import AnswerParser
from kvstore.engine.text.compiler import GrammarCompiler
from kvstore.engine.text.language import Language, no_parser
from kvstore.engine.text.response_template import choose_template
from tests.support.grammars import compiled, tokenizer_of
from tests.support.tools import CLOCK, PERSON, TOOLS, WEATHER

TOKENIZER = tokenizer_of()
PARAMS = SamplingParams()
WORDS = StructuredOutputsParams(choice=["yes"])
WEATHER_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city":"Rome","days":3}}\n</tool_call>'
CLOCK_CALL = '<tool_call>\n{"name": "clock", "arguments": {"zone":"UTC"}}\n</tool_call>'


@pytest.fixture(scope="module")
def compiler():
    made = GrammarCompiler(TOKENIZER, [TOKENIZER.eos], 300)
    yield made
    made.close()


def language(parser: str, reasons: bool = False, opening: str = "") -> Language:
    shown = "<think></think>" if reasons else ""
    answers = choose_template(SimpleNamespace(chat_template=shown, added_tokens_decoder={}), parser)
    template = SimpleNamespace(opening=opening, knows_tools=True)
    template.using = lambda tools, kwargs, continues: template
    return Language(TOKENIZER, template, "", answers)


def is_allowed(compiler, wanted: StructuredOutputsParams, text: str) -> bool:
    """Whether this can be a whole answer."""
    matcher = compiled(compiler, wanted).matcher
    ids = TOKENIZER.backend_tokenizer.encode(text).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    "kind", [{"choice": ["yes"]}, {"regex": "yes"}, {"json": {"const": 7}}, {"grammar": 'start: "yes"'}]
)
def test_reasoning_comes_before_what_must_match(compiler, kind):
    said = "7" if "json" in kind else "yes"
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**kind))
    may_think = language("hermes", reasons=True).constrained(params).structured_outputs
    assert is_allowed(compiler, may_think, said) and is_allowed(compiler, may_think, f"<think>a\nb</think>{said}")
    assert not is_allowed(compiler, may_think, f"ab</think>{said}")
    assert not is_allowed(compiler, may_think, "<think>a</think>no")
    thinks = language("hermes", reasons=True, opening="<think>").constrained(params).structured_outputs
    assert is_allowed(compiler, thinks, f"a\nb</think>{said}") and not is_allowed(compiler, thinks, said)
    closed = language("hermes", reasons=True, opening="<think></think>").constrained(params)
    assert closed is params and language("hermes").constrained(params) is params


def test_a_model_whose_prompt_opens_a_thought_when_asked_to_does_not_think_otherwise():
    one, opened = language("hermes", reasons=True), SimpleNamespace(opening="<think>\n")
    one.template.using = lambda tools, kwargs, continues: opened if kwargs.get("enable_thinking") else one.template
    params, asked = SamplingParams(structured_outputs=WORDS), AnswerOptions(reasoning_effort="low")
    assert one.constrained(params) is params and one.parser() is no_parser
    assert one.constrained(params, asked).structured_outputs.reasoning == ("", "</think>")
    assert one.parser(asked) is not no_parser
    begun = {"role": "assistant", "content": "", "reasoning_content": "Hm"}
    one.template.opening_with = lambda begun: "<think>\nHm"
    assert one.parser(begun=begun) is not no_parser


def test_calls_that_must_be_made(compiler):
    required = language("hermes").constrained(PARAMS, AnswerOptions(TOOLS, "required")).structured_outputs
    for text in (WEATHER_CALL, CLOCK_CALL, WEATHER_CALL + CLOCK_CALL):
        assert is_allowed(compiler, required, text)
    for text in ("", "Hm" + CLOCK_CALL, WEATHER_CALL.replace("Rome", "Bonn"), WEATHER_CALL.replace("weather", "clock")):
        assert not is_allowed(compiler, required, text)
    assert is_allowed(compiler, required, CLOCK_CALL * 16) and not is_allowed(compiler, required, CLOCK_CALL * 17)
    single = AnswerOptions(TOOLS, "required", parallel_tool_calls=False)
    one = language("hermes").constrained(PARAMS, single).structured_outputs
    assert is_allowed(compiler, one, CLOCK_CALL) and not is_allowed(compiler, one, CLOCK_CALL * 2)
    named = AnswerOptions(TOOLS, {"type": "function", "function": {"name": "clock"}})
    clock = language("hermes").constrained(PARAMS, named).structured_outputs
    assert is_allowed(compiler, clock, CLOCK_CALL) and not is_allowed(compiler, clock, WEATHER_CALL)


def test_reasoning_before_calls_that_must_be_made(compiler):
    thinks = language("hermes", True, "<think>").constrained(PARAMS, AnswerOptions(TOOLS, "required"))
    assert is_allowed(compiler, thinks.structured_outputs, f"Hm.</think>{CLOCK_CALL}")
    assert not is_allowed(compiler, thinks.structured_outputs, f"Hm.</think>Hm.{CLOCK_CALL}")


def test_calls_that_may_be_made(compiler):
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    may = language("hermes").constrained(PARAMS, AnswerOptions([strict, CLOCK])).structured_outputs
    wrong_clock = CLOCK_CALL.replace("UTC", "CEST")  # it is not strict
    for text in ("", "Hm", f"Hm{WEATHER_CALL}", f"{WEATHER_CALL}Hm{wrong_clock}a"):
        assert is_allowed(compiler, may, text)
    assert not is_allowed(compiler, may, "Hm" + WEATHER_CALL.replace("Rome", "Bonn"))
    at_most_one = language("hermes").constrained(PARAMS, AnswerOptions(TOOLS, parallel_tool_calls=False))
    assert is_allowed(compiler, at_most_one.structured_outputs, f"Hm{CLOCK_CALL}")
    assert not is_allowed(compiler, at_most_one.structured_outputs, f"Hm{CLOCK_CALL}{CLOCK_CALL}")
    assert language("hermes").constrained(PARAMS, AnswerOptions(TOOLS)) is PARAMS


def test_calls_or_json(compiler):
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json=PERSON))
    either = language("hermes").constrained(params, AnswerOptions(TOOLS)).structured_outputs
    assert is_allowed(compiler, either, CLOCK_CALL) and is_allowed(compiler, either, '{"name":"ab","age":7}')
    assert not is_allowed(compiler, either, "Hm")
    with pytest.raises(RequestError, match="only for a JSON answer"):
        regex = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
        language("hermes").constrained(regex, AnswerOptions(TOOLS))


def test_arguments_that_stand_by_themselves(compiler):
    properties = {"text": {"type": "string"}, "tags": {"type": "array", "items": {"const": 7}}}
    notes = {"type": "object", "properties": properties, "required": ["text"]}
    tool = {"type": "function", "function": {"name": "note", "parameters": notes}}
    wanted = language("qwen3_coder").constrained(PARAMS, AnswerOptions([tool], "required")).structured_outputs
    begin, end = "<tool_call>\n<function=note>\n", "</function>\n</tool_call>"
    text, tags = "<parameter=text>\na <b>\nc\n</parameter>\n", "<parameter=tags>\n[7,7]\n</parameter>\n"
    assert is_allowed(compiler, wanted, begin + text + end) and is_allowed(compiler, wanted, begin + text + tags + end)
    for wrong in (begin + end, begin + tags + end, begin + text + tags.replace("7,7", "8") + end):
        assert not is_allowed(compiler, wanted, wrong)


def test_arguments_that_stand_by_themselves_match_what_their_schema_refers_to(compiler):
    properties = {"days": {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "to": {"$ref": "#/$defs/City"}}
    city = {"type": "string", "enum": ["Rome", "Oslo"]}
    trip = {"type": "object", "$defs": {"City": city}, "properties": properties, "required": ["days", "to"]}
    tool = {"type": "function", "function": {"name": "trip", "parameters": trip}}
    wanted = language("qwen3_coder").constrained(PARAMS, AnswerOptions([tool], "required")).structured_outputs
    call = "<tool_call>\n<function=trip>\n{}{}</function>\n</tool_call>"
    for days, to, is_right in (("3", "Rome", True), ("null", "Oslo", True), ("a", "Rome", False), ("3", "Bonn", False)):
        arguments = f"<parameter=days>\n{days}\n</parameter>\n", f"<parameter=to>\n{to}\n</parameter>\n"
        assert is_allowed(compiler, wanted, call.format(*arguments)) == is_right


ROME, UTC = '{"city":"Rome","days":3}', '{"zone":"UTC"}'
DEEPSEEK = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
LISTS = {
    "mistral": ("[TOOL_CALLS][", ", ", "]", '{{"name": "{}", "arguments": {}}}'),
    "granite": ("<|tool_call|>[", ", ", "]", '{{"name": "{}", "arguments": {}}}'),
    "deepseek_v3": ("<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>", DEEPSEEK),
}


@pytest.mark.parametrize("name", LISTS)
def test_calls_in_one_list(compiler, name):
    opener, between, closer, form = LISTS[name]
    shown = "[TOOL_CALLS]" if name == "mistral" else ""  # else the parser's name stands for the newer form
    known = language(name)
    known = replace(known, answers=choose_template(SimpleNamespace(chat_template=shown, added_tokens_decoder={}), name))
    rome, utc = form.format("weather", ROME), form.format("clock", UTC)
    lone, both = f"{opener}{utc}{closer}", f"{opener}{utc}{between}{rome}{closer}"
    required = known.constrained(PARAMS, AnswerOptions(TOOLS, "required")).structured_outputs
    assert is_allowed(compiler, required, lone) and is_allowed(compiler, required, both)
    most, more = (opener + between.join([utc] * count) + closer for count in (16, 17))
    assert is_allowed(compiler, required, most) and not is_allowed(compiler, required, more)
    for wrong in ("", opener + closer, lone + lone, f"{opener}{utc}{rome}{closer}", "Hm" + lone, both[:-1]):
        assert not is_allowed(compiler, required, wrong)
    single = AnswerOptions(TOOLS, "required", parallel_tool_calls=False)
    one = known.constrained(PARAMS, single).structured_outputs
    assert is_allowed(compiler, one, lone) and not is_allowed(compiler, one, both)
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    may = known.constrained(PARAMS, AnswerOptions([strict, CLOCK])).structured_outputs
    for text in ("", "Hm", "Hm" + both, lone):
        assert is_allowed(compiler, may, text)
    assert not is_allowed(compiler, may, "Hm" + both.replace("Rome", "Bonn"))
    parser = AnswerParser(known.answers, "", TOOLS)
    events = [*parser.feed(both), *parser.finish("stop")]
    assert [(event.name, event.arguments) for event in events if getattr(event, "state", "") == "whole"] == [
        ("clock", UTC.replace(":", ": ")), ("weather", ROME.replace(":", ": ").replace(",", ", "))
    ]  # fmt: skip


def test_a_family_whose_calls_cannot_follow_one_another_makes_one(compiler):
    wanted = language("llama3_json").constrained(PARAMS, AnswerOptions(TOOLS, "required")).structured_outputs
    lone = '{"name": "clock", "parameters": {"zone":"UTC"}}'
    assert is_allowed(compiler, wanted, lone) and not is_allowed(compiler, wanted, lone * 2)


NOTE = {
    "type": "function",
    "function": {
        "name": "note.add",
        "parameters": {
            "type": "object", "required": ["b"],
            "properties": {
                "a": {"type": "integer"}, "b": {"type": "array", "items": {"type": ["boolean", "null"]}},
                "c": {"$ref": "#/$defs/c"},
            },
            "$defs": {"c": {"enum": ['"', "é"]}},
        },
    },
}  # fmt: skip
WRITTEN = {
    "[note.add(b=[])]": [{"b": []}],
    "[note.add(a=1, b=[true,null])]": [{"a": 1, "b": [True, None]}],
    '[note.add(b=[false], c="\\""), note.add(a=-2, b=[], c="é")]': [
        {"b": [False], "c": '"'},
        {"a": -2, "b": [], "c": "é"},
    ],
}


def test_calls_in_python(compiler):
    known = language("pythonic")
    required = known.constrained(PARAMS, AnswerOptions([NOTE], "required")).structured_outputs
    for text, arguments in WRITTEN.items():
        assert is_allowed(compiler, required, text)
        parser = AnswerParser(known.answers, "", [NOTE])
        events = [*parser.feed(text), *parser.finish("stop")]
        whole = [(event.name, json.loads(event.arguments)) for event in events if event.state == "whole"]
        assert whole == [("note.add", given) for given in arguments]
    for wrong in ("[]", "[note.add()]", "[note.add(, b=[])]", "[note.add(b=[], a=1)]", "[note.add(b=[1])]"):
        assert not is_allowed(compiler, required, wrong)
    one = known.constrained(PARAMS, AnswerOptions([NOTE], "required", parallel_tool_calls=False)).structured_outputs
    assert [is_allowed(compiler, one, text) for text in WRITTEN] == [True, True, False]


@pytest.mark.parametrize(("name", "argument"), [("a-b", "x"), ("f", "class"), ("f", "1x"), ("is", "x")])
def test_what_is_no_name_in_python_cannot_be_called_in_it(name, argument):
    parameters = {"type": "object", "properties": {argument: {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": name, "parameters": parameters}}
    with pytest.raises(RequestError, match=r"as Python, where '.*' cannot be a name"):
        language("pythonic").constrained(PARAMS, AnswerOptions([tool], "required"))


def test_without_tools_and_reasoning_there_is_no_parser():
    assert language("granite").parser()() is None
    assert language("granite").parser(AnswerOptions(TOOLS, "none"))() is None
    assert language("granite").parser(AnswerOptions(TOOLS))() is not None
    assert language("hermes", reasons=True).parser()() is not None
    assert replace(language("hermes"), answers=None).parser(AnswerOptions(TOOLS))() is None


def test_what_nothing_can_hold_a_model_to_is_refused():
    with pytest.raises(RequestError, match="nothing can hold this model") as raised:
        language("pythonic").constrained(PARAMS, AnswerOptions(TOOLS, parallel_tool_calls=False))
    assert raised.value.param == "tool_choice"
    assert language("pythonic").constrained(PARAMS, AnswerOptions(TOOLS)) is PARAMS


def test_the_effort_is_a_variable_of_the_template():
    low = AnswerOptions(reasoning_effort="low")
    assert low.variables == {"reasoning_effort": "low", "enable_thinking": True, "thinking": True}
    mine = AnswerOptions(reasoning_effort="none", chat_template_kwargs={"thinking": True})
    assert mine.variables == {"reasoning_effort": "none", "enable_thinking": False, "thinking": True}
    same = AnswerOptions(chat_template_kwargs=low.variables)
    assert low.digest == same.digest != AnswerOptions(reasoning_effort="high").digest and not AnswerOptions().digest
    with pytest.raises(RequestError, match="reasoning_effort is 'much'; give one of none, minimal") as raised:
        AnswerOptions(reasoning_effort="much")
    assert raised.value.param == "reasoning_effort"


@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder", "pythonic", "gemma4"])
@pytest.mark.parametrize(
    "wrong", [{"properties": [1]}, {"properties": {"a": {"type": 5}}}, {"required": 5, "properties": {"a": {}}}]
)
def test_parameters_that_are_no_schema_are_refused(compiler, parser, wrong):
    tool = {"type": "function", "function": {"name": "f", "parameters": wrong}}
    with pytest.raises(RequestError) as refused:
        compiled(compiler, language(parser).constrained(PARAMS, AnswerOptions([tool], "required")).structured_outputs)
    assert refused.value.param == "tools" and "f" in str(refused.value)


def test_a_union_of_nothing_is_no_schema():
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"anyOf": []}}}}}
    with pytest.raises(RequestError, match="tools: f: parameters are no JSON schema"):
        language("gemma4").constrained(PARAMS, AnswerOptions([tool], "required"))


def test_an_argument_may_have_any_name(compiler):
    parameters = {"properties": {"{value}": {"type": "string"}}, "required": ["{value}"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    wanted = language("qwen3_coder").constrained(PARAMS, AnswerOptions([tool], "required")).structured_outputs
    call = "<tool_call>\n<function=f>\n<parameter={}>\nRome\n</parameter>\n</function>\n</tool_call>"
    assert is_allowed(compiler, wanted, call.format("{value}")) and not is_allowed(compiler, wanted, call.format("key"))
