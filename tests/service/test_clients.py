"""Frameworks as clients: what their users write runs against this server, and a turn after a tool call hits the cache.

The built-in model cannot choose tools: `tool_choice` and schemas force what it answers. A test whose package is not
installed is skipped; docs/agents.md says which versions were tried. The `openai` package itself is tested beside the
routes.
"""

import asyncio
import json
from typing import Literal

import openai
import pydantic
import pytest

from tests.support.service.serving import KEY, server_fixture
from tests.support.tools import PERSON, WEATHER

MODEL = "kvstore-builtin"
BLOCK_SIZE = 16
pytestmark = pytest.mark.filterwarnings("default")  # those of the packages are theirs
server = server_fixture(api_key=KEY)


class Person(pydantic.BaseModel):
    """A person."""

    model_config = pydantic.ConfigDict(extra="forbid")  # keys that no schema bounds would go on for ever
    name: Literal["Ada", "Bob"]
    age: Literal[7, 8]


class Forecast:
    """A tool that notes for which cities it was called."""

    def __init__(self) -> None:
        self.cities: list[str] = []

    def __call__(self, city: str) -> str:
        self.cities.append(city)
        return f"It is sunny in {city}."


@pytest.fixture
def forecast(server):
    yield Forecast()
    server.wait_until_idle()


@pytest.fixture
def url(server) -> str:
    return f"{server.url}/v1"


def blocks_of(num_tokens: int) -> int:
    """How many tokens are found of a turn that ended with this many: the last one's KV was not computed."""
    return (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE


# -- openai-agents -----------------------------------------------------------------------------------------------------
@pytest.fixture
def run_agent(url, forecast):
    """Runs an agent that must ask for the weather first. make_agents: gives the agent by a class and a model."""
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)

    @agents.function_tool
    def weather(city: Literal["Rome", "Oslo"]) -> str:
        """The weather of a city."""
        return forecast(city)

    def ask_for_weather(model):
        settings = agents.ModelSettings(tool_choice="weather", max_tokens=120, include_usage=True)
        return agents.Agent("Ada", instructions="Be brief.", tools=[weather], model=model, model_settings=settings)

    async def run(said, kind, is_streamed, make_agent):
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
            agent = make_agent(getattr(agents, kind)(MODEL, client))
            if not is_streamed:
                return await agents.Runner.run(agent, said)
            result = agents.Runner.run_streamed(agent, said)
            async for _ in result.stream_events():
                pass
            return result

    def call(said, kind="OpenAIChatCompletionsModel", is_streamed=False, make_agent=ask_for_weather):
        return asyncio.run(run(said, kind, is_streamed, make_agent))

    return call


@pytest.mark.parametrize("kind", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_openai_agents(run_agent, forecast, kind, is_streamed):
    result = run_agent(f"Is it warm? {kind} {is_streamed}", kind, is_streamed)
    first, second = result.raw_responses
    assert len(forecast.cities) == 1 and isinstance(result.final_output, str)
    assert second.usage.input_tokens_details.cached_tokens == blocks_of(first.usage.total_tokens)


def test_openai_agents_hand_over_to_one_with_an_output_type(run_agent):
    agents = pytest.importorskip("agents")

    def make_agent(model):
        limit = agents.ModelSettings(max_tokens=300)
        ada = agents.Agent("Ada", output_type=Person, model=model, model_settings=limit)
        must = agents.ModelSettings(tool_choice="transfer_to_ada", max_tokens=120)
        return agents.Agent("Bob", handoffs=[ada], model=model, model_settings=must)

    result = run_agent("Who is it?", make_agent=make_agent)
    assert isinstance(result.final_output, Person) and result.last_agent.name == "Ada"
    kinds = [item.type for item in result.new_items]
    assert kinds == ["handoff_call_item", "handoff_output_item", "message_output_item"]


# -- pydantic-ai -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["OpenAIChatModel", "OpenAIResponsesModel"])
@pytest.mark.parametrize("output", ["ToolOutput", "NativeOutput"])
def test_pydantic_ai(url, forecast, kind, output):
    """The output is a call of a tool of its own, or a text that matches."""
    pydantic_ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.capabilities import AbstractCapability
    from pydantic_ai.models import openai as models
    from pydantic_ai.providers.openai import OpenAIProvider

    last = ["final_result"] if output == "ToolOutput" else "none"

    class WeatherFirst(AbstractCapability):
        def get_model_settings(self):
            return lambda run: {"tool_choice": last if forecast.cities else ["weather"], "max_tokens": 200}

    async def run():
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
            model = getattr(models, kind)(MODEL, provider=OpenAIProvider(openai_client=client))
            agent = pydantic_ai.Agent(
                model, output_type=getattr(pydantic_ai, output)(Person), capabilities=[WeatherFirst()]
            )

            @agent.tool_plain
            def weather(city: Literal["Rome", "Oslo"]) -> str:
                """The weather of a city."""
                return forecast(city)

            return await agent.run(f"Who is in Rome? {kind}")

    result = asyncio.run(run())
    first, second = [message.usage for message in result.all_messages() if message.kind == "response"]
    assert len(forecast.cities) == 1 and isinstance(result.output, Person)
    assert second.cache_read_tokens == blocks_of(first.input_tokens + first.output_tokens)


# -- instructor --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_instructor(url, forecast, mode):
    """What does not pass its validation is sent back with the reason, and asked for again."""
    instructor = pytest.importorskip("instructor")
    checked, answers = [], []

    class Checked(Person):
        @pydantic.model_validator(mode="after")
        def is_not_the_first(self):
            checked.append(self)
            if len(checked) == 1:
                raise ValueError("say it again")
            return self

    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        patched = instructor.from_openai(client, mode=instructor.Mode[mode])
        patched.on("completion:response", answers.append)
        limit = "max_output_tokens" if mode == "RESPONSES_TOOLS" else "max_tokens"
        said = [{"role": "user", "content": f"Who? {mode}"}]
        person = patched.create(model=MODEL, response_model=Checked, messages=said, **{limit: 200})
    assert isinstance(person, Checked) and len(checked) == 2
    first, second = [answer.usage for answer in answers]
    if mode == "RESPONSES_TOOLS":  # it sends no call back, but a second message after the first
        assert second.input_tokens_details.cached_tokens == blocks_of(first.input_tokens)
    else:  # it adds the usage of all rounds up, and the first found nothing
        assert second.prompt_tokens_details.cached_tokens == blocks_of(first.total_tokens)


# -- langchain ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def chat_openai(url, forecast):
    langchain = pytest.importorskip("langchain_openai")
    return lambda **more: langchain.ChatOpenAI(model=MODEL, base_url=url, api_key=KEY, max_tokens=200, **more)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("uses_responses", [False, True])
def test_langchain_tools(chat_openai, is_streamed, uses_responses):
    from langchain_core.messages import HumanMessage, ToolMessage

    model = chat_openai(use_responses_api=uses_responses, stream_usage=True)

    def ask(bound, messages):
        if not is_streamed:
            return bound.invoke(messages)
        first, *rest = bound.stream(messages)
        return sum(rest, first)

    asked = [HumanMessage(f"Is it warm in Rome? {is_streamed} {uses_responses}")]
    first = ask(model.bind_tools([WEATHER], tool_choice="weather"), asked)
    (call,) = first.tool_calls
    assert call["name"] == "weather" and call["args"]["city"] in ("Rome", "Oslo")
    second = ask(model.bind_tools([WEATHER]), [*asked, first, ToolMessage("Sunny.", tool_call_id=call["id"])])
    cached = second.usage_metadata["input_token_details"]["cache_read"]
    assert cached == blocks_of(first.usage_metadata["total_tokens"])


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_structured_output(chat_openai, method):
    def answer(schema):
        return chat_openai().with_structured_output(schema, method=method).invoke("Who?")

    assert isinstance(answer(Person), Person)
    assert set(answer(PERSON | {"title": "person"})) == {"name", "age"}


# -- litellm -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("is_streamed", [False, True])
def test_litellm(url, forecast, monkeypatch, is_streamed):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it fetches one
    litellm = pytest.importorskip("litellm")

    def ask(messages, **more):
        more |= {"stream": True, "stream_options": {"include_usage": True}} if is_streamed else {}
        answer = litellm.completion(
            model=f"openai/{MODEL}",
            api_base=url,
            api_key=KEY,
            messages=messages,
            tools=[WEATHER],
            max_tokens=120,
            **more,
        )
        return litellm.stream_chunk_builder(list(answer), messages) if is_streamed else answer

    asked = [{"role": "user", "content": f"Is it cold? {is_streamed}"}]
    first = ask(asked, tool_choice={"type": "function", "function": {"name": "weather"}})
    (call,) = first.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny."}
    second = ask([*asked, first.choices[0].message, result])
    assert second.usage.prompt_tokens_details.cached_tokens == blocks_of(first.usage.total_tokens)


# -- smolagents --------------------------------------------------------------------------------------------------------
@pytest.fixture
def no_commas(server) -> dict[str, int]:
    """Keeps the model from other keys than a schema names, for clients whose schemas allow them."""
    return {str(token_id): -100 for text, token_id in server.engine.tokenizer.get_vocab().items() if "," in text}


@pytest.mark.parametrize("is_streamed", [False, True])
def test_smolagents(url, forecast, no_commas, is_streamed):
    """It sends calls back as texts of its own, so the next turn finds the prompt before them."""
    smolagents = pytest.importorskip("smolagents")

    class Weather(smolagents.Tool):
        name, description, output_type = "weather", "The weather of a city.", "string"
        inputs = {"city": {"type": "string", "enum": ["Rome", "Oslo"], "description": "The city."}}  # noqa: RUF012

        def forward(self, city):
            return forecast(city)

    class FinalAnswer(smolagents.FinalAnswerTool):
        inputs = {"answer": {"type": "string", "enum": ["warm", "cold"], "description": "The answer."}}  # noqa: RUF012

    def must_call(name):
        return {"type": "function", "function": {"name": name}}

    def then_answer(step, agent):
        agent.model.kwargs["tool_choice"] = must_call("final_answer")

    more = {"max_tokens": 200, "logit_bias": no_commas, "tool_choice": must_call("weather")}
    # Its own prompts have more tokens than the window of the built-in model.
    prompts = smolagents.agents.EMPTY_PROMPT_TEMPLATES | {"system_prompt": "Be brief."}
    agent = smolagents.ToolCallingAgent(
        [Weather(), FinalAnswer()], smolagents.OpenAIModel(MODEL, url, api_key=KEY, **more), prompts,
        step_callbacks=[then_answer], stream_outputs=is_streamed, verbosity_level=0,
    )  # fmt: skip
    assert agent.run(f"Is it warm? {is_streamed}") in ("warm", "cold") and len(forecast.cities) == 1
    if not is_streamed:  # else it keeps no usage
        first, second = [step.model_output_message.raw.usage for step in agent.memory.steps[1:3]]
        assert second.prompt_tokens_details.cached_tokens == first.prompt_tokens // BLOCK_SIZE * BLOCK_SIZE


# -- llm ---------------------------------------------------------------------------------------------------------------
FUNCTION = """
def weather(tomorrow: bool) -> str:
    return "It is sunny."
"""


def test_llm(url, forecast, no_commas, tmp_path, monkeypatch):
    """`llm --schema ... --functions ...`: JSON, or a call. Nothing can force one of them there: seeds decide."""
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    pytest.importorskip("llm")
    from click.testing import CliRunner
    from llm.cli import cli

    can = {"supports_tools": True, "supports_schema": True, "api_key_name": "ours"}
    models = [{"model_id": "ours", "model_name": MODEL, "api_base": url, **can}]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models))

    def run(*arguments):
        done = CliRunner().invoke(cli, arguments)
        assert done.exit_code == 0, done.output
        return done.output

    flags = ["--key", KEY, "--schema", json.dumps(Person.model_json_schema()), "--functions", FUNCTION]
    for name, value in {"temperature": 1.5, "max_tokens": 100, "logit_bias": json.dumps(no_commas)}.items():
        flags += ["-o", name, str(value)]
    ended = {}
    for seed in range(50):
        answer = run(f"Is it warm? {seed}", "-m", "ours", "-o", "seed", str(seed), *flags)
        rounds = json.loads(run("logs", "list", "--json", "-c"))
        ended[len(rounds)] = answer, rounds
        if {1, 2} <= ended.keys():
            break
    Person.model_validate_json(ended[1][0])
    first, second = ended[2][1]
    assert [result["output"] for result in second["tool_results"]] == ["It is sunny."]
    cached = json.loads(second["token_details"])["prompt_tokens_details"]["cached_tokens"]
    assert cached == blocks_of(first["input_tokens"] + first["output_tokens"])
