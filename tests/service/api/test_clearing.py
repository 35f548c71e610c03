"""`context_management` on the routes that have it: what a growing conversation hits, and what its answers tell."""

from contextlib import contextmanager

import pytest

from tests.support.conversations import failing_to_store
from tests.support.engines import chain_of, stored_parents
from tests.support.faults import before_each_step
from tests.support.service.packages import anthropic_client
from tests.support.service.serving import KEY, serving

MODEL = {"tokenizer": True, "max_position_embeddings": 4096}
RESULT = "Sunny, with some wind from the west, and rain at night. " * 16
TOOL_USES, THINKING = "clear_tool_uses_20250919", "clear_thinking_20251015"
EDIT = {"type": TOOL_USES, "trigger": {"type": "input_tokens", "value": 300}, "keep": {"type": "tool_uses", "value": 1}}
ALL = {"edits": [{**EDIT, "keep": {"type": "tool_uses", "value": 0}}]}
WANTED = {"edits": [EDIT]}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "sky", "parameters": SCHEMA}}]
OURS = [{"name": "sky", "input_schema": SCHEMA}]
FLAT = [{"type": "function", "name": "sky", "parameters": SCHEMA}]
ONE_CALL = {"type": "any", "disable_parallel_tool_use": True}
MUST = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 120, "seed": 3}
NUM_TURNS = 8  # the seventh clears


@contextmanager
def server_on(model, folder):
    tiers = {"hbm": "16MiB", "cpu": "16MiB", "disk": "256MiB", "path": folder / "store"}
    with serving(model, engine={"cache_tiers": tiers, "load": "always"}, api_key=KEY) as server:
        yield server
        server.wait_until_idle()


@pytest.fixture(scope="module")
def served(model, tmp_path_factory):
    with server_on(model, tmp_path_factory.mktemp("kv")) as server:
        yield server


@pytest.fixture
def server(served):
    yield served
    served.wait_until_idle()


@pytest.fixture
def client(server):
    with anthropic_client(server) as one:
        yield one


def tokens(usage) -> tuple[int, int]:
    """Of the prompt, and of these the cached ones; of any route."""
    if "prompt_tokens" in usage:
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
    if "input_tokens_details" in usage:
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    cached = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + cached + usage["cache_creation_input_tokens"], cached


def num_cleared(applied) -> int:
    return sum(one["cleared_tool_uses"] for one in applied)


def check_steps(usages, applied, at_least=1):
    """Each turn hits all of the turn before but where something was cleared; there are few such steps. applied: how
    many uses are cleared by then.
    """
    steps = [turn for turn in range(1, len(usages)) if applied[turn] != applied[turn - 1]]
    assert at_least <= len(steps) <= len(usages) // 3 and applied == sorted(applied), applied
    for turn in range(1, len(usages)):
        before, _ = tokens(usages[turn - 1])
        _, cached = tokens(usages[turn])
        # The last answer's ids are there, too, but its last token's KV was not computed.
        assert (cached < before // 16 * 16) == (turn in steps), (turn, steps, usages[turn])
    return steps


def anthropics(client, messages, wanted=WANTED, **more):
    given = {"model": "kvstore", "max_tokens": 120, "tools": OURS, "tool_choice": ONE_CALL, **more}
    extra = {"seed": 3, "model": None}
    return client.beta.messages.create(messages=messages, context_management=wanted, extra_body=extra, **given)


def result_for(message):
    """What a client adds after an answer with a call."""
    (call,) = [block for block in message.content if block.type == "tool_use"]
    said = [block.model_dump(exclude_none=True) for block in message.content]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": RESULT}
    return [{"role": "assistant", "content": said}, {"role": "user", "content": [result]}]


def history_of(num_uses):
    """What a client has once so many calls were answered."""
    history = [{"role": "user", "content": "How is the weather?"}]
    for number in range(num_uses):
        use = {"type": "tool_use", "id": f"toolu_{number}", "name": "sky", "input": {"a": 1}}
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": RESULT}
        history += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    return history


# -- /v1/messages ------------------------------------------------------------------------------------------------------
def test_a_client_that_sends_its_whole_history_hits_between_steps(client):
    history, usages, applied, told = [{"role": "user", "content": "How is the weather?"}], [], [], []
    for _ in range(NUM_TURNS):
        message = anthropics(client, history)
        told.append((list(history), tokens(message.usage.model_dump())[0]))
        usages.append(message.usage.model_dump())
        applied.append(num_cleared([one.model_dump() for one in message.context_management.applied_edits]))
        history += result_for(message)
    steps = check_steps(usages, applied)
    assert applied[0] == 0 and applied[-1] <= NUM_TURNS - 1 - 1
    assert [usage.get("miss", {}).get("cause") for usage in usages] == [
        "edit" if turn in steps else None for turn in range(NUM_TURNS)
    ]
    for messages, number in told:  # whatever came since
        more = {"model": "claude-x", "messages": messages, "tools": OURS}
        counted = client.beta.messages.count_tokens(context_management=WANTED, **more)
        assert counted.input_tokens == number
        plain = client.messages.count_tokens(**more)
        assert counted.context_management.original_input_tokens == plain.input_tokens >= number
    assert plain.input_tokens > number


def test_after_a_restart_the_same_is_cleared_and_hit(model, tmp_path):
    history, applied, usages = history_of(NUM_TURNS - 2), [], []
    for _ in range(2):
        with server_on(model, tmp_path) as server, anthropic_client(server) as client:
            message = anthropics(client, history, ALL)
            applied.append(message.context_management.applied_edits)
            usages.append(message.usage.model_dump())
            history += result_for(message)
    assert applied[1] == applied[0] != [], "no step since"
    assert tokens(usages[1])[1] >= tokens(usages[0])[0] // 16 * 16


def test_a_stream_tells_it_with_its_last_delta(client):
    history = history_of(NUM_TURNS)
    whole = anthropics(client, history, ALL).context_management
    assert whole.applied_edits[0].cleared_tool_uses > 0
    given = {"model": "claude-x", "max_tokens": 4, "messages": history, "tools": OURS}
    with client.beta.messages.stream(**given, context_management=ALL) as stream:
        deltas = [event for event in stream if event.type == "message_delta"]
        assert stream.get_final_message().context_management == whole
    assert deltas[-1].context_management == whole
    assert client.beta.messages.create(**given).context_management is None


# -- /chat -------------------------------------------------------------------------------------------------------------
def chat(server, wanted=WANTED, **body):
    reply = server.post("/chat", {**MUST, "context_management": wanted, **body})
    assert reply.status == 200, reply.body
    return reply.json()


def next_of(answer, call_id=None):
    """What the next turn brings: the result of its call."""
    (call,) = answer["message"]["tool_calls"]
    result = {"role": "tool", "tool_call_id": call_id or call["id"], "content": RESULT}
    return {"session_id": answer["session_id"], "messages": [result]}


def answers_of_session(server, wanted):
    answers = [chat(server, wanted, message=f"How is the weather? {wanted}")]
    for _ in range(NUM_TURNS - 1):
        answers.append(chat(server, wanted, **next_of(answers[-1])))
    return answers


@pytest.mark.parametrize("reuse", [None, "reencode"])
def test_a_session_clears_by_edits_which_its_transcript_shows(server, reuse):
    """With the inputs of its calls, where it computes."""
    own = {"clear_tool_inputs": True} if reuse is None else {"keep": {"type": "tool_uses", "value": 2}}
    wanted = {"edits": [{**EDIT, **own}]} | ({} if reuse is None else {"reuse": reuse})
    answers = answers_of_session(server, wanted)
    done = [num_cleared(one["context_management"]["applied_edits"]) for one in answers]
    steps = [turn for turn, number in enumerate(done) if number]
    if reuse is None:
        check_steps([one["usage"] for one in answers], [sum(done[: turn + 1]) for turn in range(NUM_TURNS)])
        assert all(answers[turn]["usage"]["prompt_tokens_details"]["miss"]["cause"] == "edit" for turn in steps)
    else:
        details = [one["usage"]["prompt_tokens_details"]["cached_tokens_details"] for one in answers]
        assert steps and details[steps[0]]["reencoded"] > 0 == details[steps[0] - 1]["reencoded"]
    assert [one["turn"] for one in answers] == [
        turn + 1 + sum(1 for step in steps if step <= turn) for turn in range(NUM_TURNS)
    ]
    shown = server.get(f"/sessions/{answers[0]['session_id']}").json()
    results = [one["content"] for one in shown["messages"] if one["role"] == "tool"]
    assert results == ["[cleared to save room]"] * sum(done) + [RESULT] * (NUM_TURNS - 1 - sum(done))
    calls = [one["tool_calls"][0]["function"] for one in shown["messages"] if one["role"] == "assistant"]
    num_inputs = sum(done) if reuse is None else 0
    assert [call["arguments"] == "{}" for call in calls] == [number < num_inputs for number in range(NUM_TURNS)]
    edits = [turn for turn in shown["turns_data"] if turn["edits"]]
    assert [len(turn["edits"]) for turn in edits] == [done[step] * (2 if reuse is None else 1) for step in steps]
    said = [one for turn in shown["turns_data"] for one in turn["messages"] if one["role"] == "tool"]
    assert [one["content"] for one in said] == [RESULT] * (NUM_TURNS - 1)
    fork = server.post(f"/sessions/{shown['id']}/fork", {"turn": edits[0]["turn"] - 1}).json()["id"]
    there = server.get(f"/sessions/{fork}").json()["messages"]
    assert all(one["content"] == RESULT for one in there if one["role"] == "tool")


@pytest.fixture(scope="module")
def last(served):
    """The last answer of a session in which nothing was cleared."""
    answers = answers_of_session(served, None)
    assert not any("context_management" in one for one in answers)
    return answers[-1]


@pytest.fixture
def turn(server, last):
    """The next turn of a copy of that session, which clears all that it may."""
    fork = server.post(f"/sessions/{last['session_id']}/fork").json()["id"]
    return {**MUST, **next_of(last), "session_id": fork, "context_management": WANTED}


def test_a_stream_of_a_session_tells_it_at_its_end(server, turn):
    events = server.post("/chat", {**turn, "stream": True}).events()
    assert num_cleared(events[-2]["context_management"]["applied_edits"]) == NUM_TURNS - 1


def test_an_answer_that_is_told_again_says_what_its_turn_has_cleared(server, turn):
    first, again = (server.post("/chat", turn, **{"Idempotency-Key": "told again"}).json() for _ in range(2))
    assert again == first and num_cleared(first["context_management"]["applied_edits"]) == NUM_TURNS - 1


@pytest.mark.parametrize("wrong", ["logit_bias", "messages"])
def test_a_turn_that_is_refused_clears_nothing(server, turn, last, wrong):
    refused = {**turn, "logit_bias": {"999999": 1}} if wrong == "logit_bias" else turn | {
        "messages": next_of(last, "nope")["messages"]
    }  # fmt: skip
    before = server.get(f"/sessions/{turn['session_id']}").json()
    assert server.post("/chat", refused).status == 400
    assert server.get(f"/sessions/{turn['session_id']}").json() == before
    assert num_cleared(server.post("/chat", turn).json()["context_management"]["applied_edits"]) == NUM_TURNS - 1


# -- /v1/responses -----------------------------------------------------------------------------------------------------
def respond(server, said, **more):
    body = {"input": said, "tools": FLAT, "tool_choice": "required", "parallel_tool_calls": False, "seed": 3}
    reply = server.post("/v1/responses", {**body, "max_output_tokens": 120, "context_management": WANTED, **more})
    assert reply.status == 200, reply.body
    return reply.json()


def output_for(response):
    (call,) = response["output"]
    return {"type": "function_call_output", "call_id": call["call_id"], "output": RESULT}


def test_responses_of_a_session_and_without_one(server):
    """A session tells what each turn has cleared; a history what is cleared of it."""
    stored, history = [respond(server, "How is the weather?")], [{"role": "user", "content": "How is the weather?"}]
    free = [respond(server, history, store=False)]
    for _ in range(NUM_TURNS - 1):
        stored.append(respond(server, [output_for(stored[-1])], previous_response_id=stored[-1]["id"]))
        history += [*free[-1]["output"], output_for(free[-1])]
        free.append(respond(server, history, store=False))
    for answers, adds_up in ((stored, True), (free, False)):
        done = [num_cleared(one["context_management"]["applied_edits"]) for one in answers]
        applied = [sum(done[: turn + 1]) for turn in range(NUM_TURNS)] if adds_up else done
        steps = check_steps([one["usage"] for one in answers], applied)
    assert len({one["id"].rsplit("_", 1)[0] for one in stored}) == 1, "no fork"
    step = next(turn for turn, one in enumerate(stored) if one["context_management"]["applied_edits"])
    assert server.get(f"/v1/responses/{stored[step]['id']}").json()["previous_response_id"] == stored[step - 1]["id"]
    events = server.post("/v1/responses", {
        "input": history, "store": False, "stream": True, "tools": FLAT, "max_output_tokens": 2,
        "context_management": WANTED,
    }).events()  # fmt: skip
    assert events[-1]["response"]["context_management"] == free[-1]["context_management"] and steps


# -- compaction --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("store", [True, False])
def test_what_is_summed_up_is_hit_and_evicted_last_until_the_summary_is_back(server, store):
    said = [{"role": "user", "content": f"How is the weather, {store}? " * 20}]
    first = respond(server, said, store=store, tools=[], tool_choice=None, max_output_tokens=40)
    named = {"previous_response_id": first["id"]} if store else {"input": [*said, *first["output"]]}
    chain = chain_of(server.engine, server.context.recall.prompt_ids("", "", said))
    conversation, seen = server.engine.connector.parts.store.steering.conversation_of(chain), []
    server.wait_until_idle()
    assert conversation.num_running == 0
    with before_each_step(server.engine, lambda: seen.append(conversation.num_running)):
        compact = server.post("/v1/responses/compact", {**named, "max_output_tokens": 20}).json()
    assert len(seen) >= 20 and set(seen) == {1}, "those with a request that runs are evicted last of all"
    server.wait_until_idle()
    assert conversation.num_running == 0
    num_known = first["usage"]["total_tokens"] - 1
    assert compact["usage"]["input_tokens_details"]["cached_tokens"] >= num_known // 16 * 16


# -- what is wrong -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/chat", "/v1/responses"])
@pytest.mark.parametrize(
    ("wanted", "param"),
    [
        ({"edits": [{"type": "compact_20260112"}]}, "context_management.edits[0].type"),
        ({"edits": [EDIT, {**EDIT, "type": "clear_all"}]}, "context_management.edits[1].type"),
        ({"edits": [{**EDIT, "keep": {"type": "turns", "value": 1}}]}, "context_management.edits[0].keep.type"),
        (
            {"edits": [{**EDIT, "trigger": {"type": "input_tokens", "value": -1}}]},
            "context_management.edits[0].trigger.value",
        ),
        ({"edits": [{"type": THINKING, "keep": "none"}]}, "context_management.edits[0].keep"),
        ({"edits": [EDIT], "reuse": "forget"}, "context_management.reuse"),
        ({"edit": [EDIT]}, "context_management.edit"),
        ({"edits": [EDIT, {**EDIT, "keeps": 3}]}, "context_management.edits[1].keeps"),
        (
            {"edits": [{**EDIT, "keep": {"type": "tool_uses", "value": 2, "most": 4}}]},
            "context_management.edits[0].keep.most",
        ),
        ([{"type": "compaction", "compact_threshold": 1000}], "context_management"),
    ],
)
def test_what_is_wrong_is_a_400_that_names_the_field(server, path, wanted, param):
    said = {"message": "Hello", "messages": [{"role": "user", "content": "Hello"}], "input": "Hello"}
    del said["messages" if path == "/chat" else "message"]
    reply = server.post(path, {**said, "context_management": wanted})
    error = reply.json()["error"]
    assert reply.status == 400 and param in error["message"] and error.get("param", param) == param


def test_what_a_step_that_cannot_be_stored_has_computed_is_gone_with_its_session(server):
    """Before it stands what others have, so that no deletion would find it from there."""
    wanted = {"edits": [{**EDIT, "keep": {"type": "tool_uses", "value": 2}}], "reuse": "reencode"}
    answer, engine = chat(server, wanted, message="How is the weather, not stored?"), server.engine
    while not answer["context_management"]["applied_edits"]:
        fork = server.post(f"/sessions/{answer['session_id']}/fork", {}).json()["id"]
        engine.flush()
        before = set(stored_parents(engine))
        with failing_to_store(engine):
            body = {**MUST, "context_management": wanted, **next_of(answer), "session_id": fork}
            assert server.post("/chat", body).status == 503
        assert server.request("DELETE", f"/sessions/{fork}").status == 200
        engine.flush()
        assert set(stored_parents(engine)) <= before
        answer = chat(server, wanted, **next_of(answer))


def test_only_a_session_reencodes(server):
    body = {"input": "Hello", "store": False, "context_management": {**WANTED, "reuse": "reencode"}}
    assert server.post("/v1/responses", body).error["param"] == "context_management.reuse"
    assert server.post("/v1/responses", {**body, "store": True, "max_output_tokens": 1}).status == 200
