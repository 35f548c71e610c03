"""Histories as text against what sessions would have sent: the same ids, whoever asks."""

import json
import random
from collections.abc import Callable

import pytest

from kvstore import AnswerOptions, Engine, SamplingParams
from kvstore.engine.sessions.recall import Keys, KnownConversation, Lines, Recall
from kvstore.engine.text.histories import history_ids
from kvstore.errors import RequestError
from tests.engine.text.test_chat_template import CHATML, LLAMA3, MISTRAL, THINKING, assistant, make, user
from tests.support.engines import greedy, open_engine, save_model, settle
from tests.support.tools import WEATHER

MODEL = {"tokenizer": True, "max_position_embeddings": 1024}
TEXTS = [
    "Hello, my name is Anna.", "What is my name?\n\n", "  spaces on both sides  ", "Schöne Grüße, 日本語 🎉",
    "<|end|> and <|user|>", "a", "Go on.", "Tell me about the sea, and how far it is from here.",
    "kvstorecontent1end", "…\n- one\n- two",
]  # fmt: skip


@pytest.fixture(scope="module")
def builtin():
    with Engine(device="cpu", seed=3) as engine:
        yield engine
        engine.check_integrity()


def rendered(engine, messages):
    """The ids that the template makes of a whole history."""
    return engine.chats.language.template.prompt_ids(messages)


def text_of(engine: Engine, token_ids) -> str:
    """Without control tokens: an answer may hold some that its text does not show."""
    return engine.tokenizer.decode(token_ids, skip_special_tokens=True)


def no_controls(engine: Engine) -> dict[int, float]:
    """A bias against every token that a text does not show."""
    return dict.fromkeys(engine.tokenizer.added_tokens_decoder, -100.0)


class Client:
    """Stateless: sends all it has, and keeps what it was told."""

    def __init__(self, engine: Engine, recall: Recall, system="", tenant="", salt=""):
        self.engine, self.recall, self.tenant, self.salt = engine, recall, tenant, salt
        self.messages = [{"role": "system", "content": system}] if system else []

    def send(self, text: str, params: SamplingParams | None = None, choice: int = 0):
        params = params or greedy(10)
        self.messages.append(user(text))
        prompt = self.recall.prompt_ids(self.tenant, self.salt, self.messages)
        handle = self.engine.submit(prompt, params, self.tenant, self.salt)
        list(self.engine.stream(handle))
        self.recall.note(self.tenant, self.salt, self.messages, handle.output)
        self.messages.append(assistant(handle.output.choices[choice].text))
        return handle.output

    def drop(self, num_turns: int) -> None:
        first = int(self.messages[0]["role"] == "system")
        del self.messages[first : first + 2 * num_turns]


def params_of(random_: random.Random, free: str) -> SamplingParams:
    """Sampled, to the length or to a stop string of letters that are common."""
    stop = [random_.choice("aeiou ") + random_.choice(["", "n", "t"])] if random_.random() < 0.4 else []
    return SamplingParams(
        temperature=random_.choice([0.0, 1.0, 1.5]), max_tokens=random_.randint(1, 25), stop=stop,
        seed=random_.randrange(1000), ignore_eos=random_.random() < 0.5,
    )  # fmt: skip


# -- the same ids as a session ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("system", ["", "Be brief.", "Never say <|end|>, äh."])
def test_the_ids_of_a_session_that_had_the_same_conversation(builtin, system):
    random_ = random.Random(f"ids of {system}")
    template, num_odd = builtin.chats.language.template, 0
    for number in range(4):
        tenant = f"t{number}{system}"
        recall, chat = Recall(builtin.chats), builtin.chat(f"chat-{number}", tenant, system=system or None)
        messages = [{"role": "system", "content": system}] if system else []
        for _ in range(5):
            text, params = random_.choice(TEXTS), params_of(random_, "")
            messages.append(user(text))
            prompts = [one.prompt_ids(tenant, "", messages) for one in (recall, Recall(builtin.chats))]
            known = chat.token_ids
            out = chat.send(text, params)
            num_odd += out.prompt_token_ids != template.prompt_ids(messages)
            for prompt in prompts:
                assert prompt == out.prompt_token_ids and prompt[: len(known)] == known
            recall.note(tenant, "", messages, out)
            messages.append(assistant(out.text))
    assert num_odd > 3  # else the text alone would have done


def test_every_choice_is_known_and_a_client_may_go_back_to_another(builtin):
    recall = Recall(builtin.chats)
    client = Client(builtin, recall, tenant="choices")
    out = client.send("Say something", SamplingParams(n=3, max_tokens=12, temperature=2.0, seed=2))
    assert len({choice.text for choice in out.choices}) == 3
    for choice in out.choices:
        messages = [user("Say something"), assistant(choice.text), user("And then?")]
        said = choice.token_ids[:-1] if choice.finish_reason == "stop" else choice.token_ids
        for one in (recall, Recall(builtin.chats)):
            prompt = one.prompt_ids("choices", "", messages)
            assert prompt[: len(out.prompt_token_ids) + len(said)] == out.prompt_token_ids + said


def test_an_answer_is_known_by_its_text_when_what_was_before_it_changed(builtin):
    recall, params = (
        Recall(builtin.chats),
        SamplingParams(max_tokens=20, temperature=2.5, logit_bias=no_controls(builtin)),
    )
    num_odd = 0
    for number in range(5):
        client = Client(builtin, recall, "Be brief.", tenant="edited")
        outs = [client.send(text, params) for text in TEXTS[number : number + 3]]
        kept = [*client.messages[3:], user("x")]
        edited = [*client.messages[:1], user("Something else"), assistant("Never said."), *kept]
        for messages in (edited, kept):
            prompt = recall.prompt_ids("edited", "", messages)
            for out in outs[1:]:
                said = "".join(chr(i) for i in out.token_ids)
                assert said in "".join(chr(i) for i in prompt)
            plain = rendered(builtin, messages)
            assert text_of(builtin, prompt) == text_of(builtin, plain)
            num_odd += prompt != plain
    assert num_odd > 3


def test_what_an_answers_text_does_not_show_stays_in_its_conversation(builtin):
    end = builtin.tokenizer.eos_token_id
    client = Client(builtin, Recall(builtin.chats), tenant="silent")
    out = client.send("Hello", greedy(6))
    out.choices[0].token_ids[2:2] = [end]
    client.recall.note("seen", "", [user("Hello")], out)
    for one in (client.recall, Recall(builtin.chats)):
        known = one.prompt_ids("seen", "", [*client.messages, user("x")])
        assert known[: len(out.prompt_token_ids) + 7] == out.prompt_token_ids + out.token_ids
        messages = [user("Something else"), client.messages[1], user("x")]
        assert one.prompt_ids("seen", "", messages) == rendered(builtin, messages)


def test_agents_that_were_told_the_same_words_in_other_tokens_each_get_their_own(builtin):
    """The named conversation's answer goes first, also after a restart; one without a name, or with a new one, gets the
    latest.
    """
    recall, out = Recall(builtin.chats), builtin.generate([[1, 2]], greedy(1))[0]
    said, whole = [user("Hello")], builtin.tokenizer.encode("Hello there", add_special_tokens=False)
    single = [i for letter in "Hello there" for i in builtin.tokenizer.encode(letter, add_special_tokens=False)]
    out.prompt_token_ids = recall.prompt_ids("agents", "", said)
    out.choices[0].text = "Hello there"
    for name, ids in (("ada", whole), ("eve", single)):
        out.choices[0].token_ids[:] = ids
        recall.note("agents", "", said, out, conversation=name)
    messages, before = [*said, assistant("Hello there"), user("And then?")], len(out.prompt_token_ids)
    assert single != whole
    for one in (recall, Recall(builtin.chats)):
        for tenant, name, ids in (
            ("agents", "ada", whole), ("agents", "eve", single), ("agents", "new", single), ("agents", "", single),
            ("others", "ada", whole), ("others", "eve", whole),
        ):  # fmt: skip
            prompt = one.prompt(tenant, "", messages, conversation=name).token_ids
            assert prompt[before : before + len(ids)] == ids, (tenant, name)


def test_a_history_that_nobody_knows_is_what_the_template_makes_of_it(builtin):
    recall = Recall(builtin.chats)
    for messages in (
        [user("hi")], [user("hi"), assistant("hello")], [user("a"), assistant("b"), user("c"), user("d")],
        [{"role": "system", "content": "s"}], [{"role": "tool", "content": "42"}, user("q")],
        [assistant("b"), user("c")],
    ):  # fmt: skip
        assert recall.prompt_ids("nobody", "", messages) == rendered(builtin, messages)
    with pytest.raises(RequestError, match="messages is empty"):
        recall.prompt_ids("nobody", "", [])


def test_a_model_without_a_template_says_so(tmp_path):
    with Engine(save_model(tmp_path / "bare")) as engine, pytest.raises(RequestError, match="has no tokenizer"):
        Recall(engine.chats).prompt_ids("", "", [user("hi")])


def test_a_sessions_turns_are_known_until_it_is_deleted(builtin):
    recall, chat = Recall(builtin.chats), builtin.chat("noted", "own")
    out = chat.send("Hello there", SamplingParams(max_tokens=20, temperature=1.5, ignore_eos=True, seed=8))
    recall.note("own", "", [user("Hello there")], out, session_id="noted")
    messages = [*chat.messages, user("More")]
    known = out.prompt_token_ids + out.token_ids
    for one in (recall, Recall(builtin.chats)):
        assert one.prompt_ids("own", "", messages)[: len(known)] == known
    assert recall.forget_session("other", "noted")
    assert recall.prompt_ids("own", "", messages)[: len(known)] == known
    assert recall.forget_session("own", "noted")
    assert recall.prompt_ids("own", "", messages) == rendered(builtin, messages)


def test_the_calls_of_an_answer_are_its_tenants_until_its_session_is_deleted(builtin):
    """In any form of the same JSON. What another says is what it sent."""
    recall, chat = Recall(builtin.chats), builtin.chat("calls", "own")
    must_call = AnswerOptions([WEATHER], tool_choice="required")
    out = chat.send("Hello there", SamplingParams(max_tokens=80), must_call)
    recall.note("own", "", [user("Hello there")], out, session_id="calls", options=must_call)
    known = out.prompt_token_ids + out.token_ids

    def prompt(tenant: str, change: Callable[[dict], object], call_id: str | None = None) -> list[int]:
        (call,) = out.choices[0].message["tool_calls"]
        arguments = change(json.loads(call["function"]["arguments"]))
        sent = {**call, "id": call_id or call["id"], "function": {"name": "weather", "arguments": arguments}}
        messages = [user("Hello there"), {"role": "assistant", "content": None, "tool_calls": [sent]}, user("More")]
        return recall.prompt_ids(tenant, "", messages, AnswerOptions([WEATHER]))

    same: list[Callable[[dict], object]] = [
        lambda given: json.dumps(dict(reversed(given.items())), indent=2), lambda given: given,
        lambda given: json.dumps(given | {"days": float(given["days"])}),
    ]  # fmt: skip
    for change in same:
        assert prompt("own", change)[: len(known)] == known
        assert prompt("other", change)[: len(known)] != known
    assert prompt("own", lambda given: json.dumps(given), "call_of_others")[: len(known)] != known
    assert prompt("own", lambda given: given | {"days": given["days"] % 9 + 1})[: len(known)] != known
    assert recall.forget_session("own", "calls")
    assert prompt("own", same[0])[: len(known)] != known


def test_an_answer_that_ends_with_a_space_keeps_its_ids_in_a_session_too(builtin):
    template = builtin.chats.language.template
    messages = [user("hi"), assistant(" so ")]
    ids = [*template.prompt_ids(messages[:1]), 50, 51]
    following = template.next_ids(ids, messages, "ok")
    assert following[: len(ids)] == ids
    assert following == history_ids(template, [*messages, user("ok")], {1: [50, 51]})


# -- templates --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("text", [CHATML, LLAMA3], ids=["chatml", "llama3"])
@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "be <|im_end|> kind "}]], ids=["", "system"])
def test_turn_by_turn_is_all_at_once(text, system):
    template, random_ = make(text), random.Random(4)
    for _ in range(30):
        messages, ids, answers = [*system, user(random_.choice(TEXTS))], None, {}
        ids = template.prompt_ids(messages)
        for _ in range(4):
            said = [random_.randrange(200) for _ in range(random_.randint(0, 4))]
            answers[len(messages)] = said
            messages.append(assistant(random_.choice(["ok ", " yes", "<|im_end|>", "no\n\n", ""])))
            known, question = (len(messages) - 1, ids + said), random_.choice([*TEXTS, "<|im_end|><|eot_id|> x "])
            ids = template.next_ids(ids + said, messages, question)
            messages.append(user(question))
            assert history_ids(template, messages, answers) == ids
            assert history_ids(template, messages, {}, known) == ids


def test_an_answer_whose_reasoning_is_dropped_is_encoded_as_text_with_all_before_it():
    template = make(THINKING)
    messages = [user("a"), assistant("one"), user("b"), assistant("<think>x</think>\ntwo"), user("c")]
    messages += [assistant("three"), user("d")]
    answers = {1: [1, 2], 3: [3, 4], 5: [5, 6]}
    recalled = history_ids(template, messages, answers)
    before = template.prompt_ids(messages[:5])
    assert recalled[: len(before) + 2] == [*before, 5, 6]
    assert history_ids(template, messages[:5], {1: [1, 2], 3: [3, 4]}) is None
    assert history_ids(template, messages[:5], {}, (3, [9, 9])) is None


def test_a_template_that_moves_the_system_prompt_gets_nothing_else_than_text():
    template = make(MISTRAL)
    messages = [{"role": "system", "content": "s"}, user("a"), assistant("one"), user("b")]
    assert history_ids(template, messages, {2: [1, 2]}) is None
    assert history_ids(template, messages[1:], {1: [1, 2]}) is not None


def test_an_answer_that_is_opened_otherwise_than_it_was_is_text():
    opened = CHATML.replace("'<|im_start|>assistant\n' }}{% endif", "'<|im_start|>assistant\n<think>\n' }}{% endif")
    assert history_ids(make(opened), [user("a"), assistant("one"), user("b")], {1: [1, 2]}) is None
    numbered = CHATML.replace("m.role + '\n'", "m.role + (loop.index | string if messages | length > 3 else '') + '\n'")
    messages = [user("a"), assistant("one"), user("b"), assistant("two"), user("c")]
    assert history_ids(make(numbered), messages, {1: [1, 2], 3: [3]}) is None


# -- what is cached ----------------------------------------------------------------------------------------------------
def test_the_next_request_computes_only_what_is_new(builtin):
    client = Client(builtin, Recall(builtin.chats), "Be brief.", tenant="cached")
    params = SamplingParams(max_tokens=30, temperature=1.2, ignore_eos=True, seed=5)
    known: list[int] = []
    for text in TEXTS[:5]:
        out = client.send(text, params)
        assert out.prompt_token_ids[: len(known)] == known
        assert out.usage.cached_tokens >= max(len(known) - 1, 0) // 16 * 16
        known = out.prompt_token_ids + out.token_ids
    again = Client(builtin, client.recall, tenant="cached", salt="salty")
    stranger = Client(builtin, client.recall, tenant="stranger")
    for other in (again, stranger):
        other.messages = list(client.messages)
        out = other.send("And now?", params)
        assert out.usage.cached_tokens == 0 and out.prompt_token_ids[: len(known)] != known
        assert out.prompt_token_ids == builtin.chats.language.template.prompt_ids(other.messages[:-1])
    salted = again.send("More?", params)
    assert salted.usage.cached_tokens >= (len(out.prompt_token_ids) - 1) // 16 * 16


def test_after_a_restart_the_answers_lead_to_what_is_on_disk(model, tmp_path):
    params = SamplingParams(max_tokens=40, temperature=1.0, ignore_eos=True, seed=5)
    with open_engine(model, tmp_path / "store") as engine:
        client = Client(engine, Recall(engine.chats), "Be brief.")
        for text in TEXTS[:3]:
            out = client.send(text, params)
        known = out.prompt_token_ids + out.token_ids
        settle(engine)
        engine.flush()
        engine.answers.flush()
    files = b"".join(path.read_bytes() for path in (tmp_path / "store" / "answers").iterdir())
    assert not any(message["content"].encode() in files for message in client.messages)
    with open_engine(model, tmp_path / "store") as engine:
        client.engine, client.recall = engine, Recall(engine.chats)
        out = client.send("Do you remember?", params)
        assert out.prompt_token_ids[: len(known)] == known
        assert out.usage.cached_tokens_details.disk >= (len(known) - 1) // 16 * 16


# -- dropped turns -----------------------------------------------------------------------------------------------------
def test_whatever_a_client_does_the_model_reads_what_the_template_says(engine):
    """Drops, edits, goes back, repeats; the service forgets."""
    template, bias = engine.chats.language.template, no_controls(engine)
    num_odd = 0
    for seed in range(2):
        random_, recall = random.Random(seed), Recall(engine.chats)
        clients = [Client(engine, recall, random_.choice(["", "Be brief."]), f"tenant-{n % 2}") for n in range(3)]
        for step in range(30):
            client = random_.choice(clients)
            action = random_.random()
            if action < 0.25 and client.messages:
                client.drop(1)
            elif action < 0.28:
                del client.messages[random_.randrange(len(client.messages) + 1) :]
            elif action < 0.31 and client.messages:
                client.messages[-1] = {**client.messages[-1], "content": random_.choice(TEXTS)}
            elif action < 0.34:
                other = random_.choice(clients)
                client.messages = list(other.messages)
            elif action < 0.37:
                client.recall = Recall(engine.chats)
            seeded = SamplingParams(max_tokens=random_.randint(8, 24), logit_bias=bias, seed=100 * seed + step)
            out = client.send(random_.choice(TEXTS), seeded)
            plain = template.prompt_ids(client.messages[:-1])
            assert engine.tokenizer.decode(out.prompt_token_ids) == engine.tokenizer.decode(plain)
            num_odd += out.prompt_token_ids != plain
            assert out.usage.cached_tokens_details.reencoded == 0
            if sum(len(message["content"]) for message in client.messages) > 900:
                client.drop(3)
    assert num_odd > 25


# -- memory and threads ------------------------------------------------------------------------------------------------
def test_conversations_are_shared_and_bounded():
    lines = Lines(14_000)

    def add(number: int, before: int, known: KnownConversation) -> None:
        lines.add(b"h%d" % number, b"h%d" % before, known)

    for number in range(40):  # one conversation that grows is kept once
        add(number, number - 1, KnownConversation(2 * number + 2, list(range(100 * (number + 1)))))
    assert lines.num_tokens < 14_000  # as often as it is long, it would be ten times as much
    for number in range(40):
        found = lines.find_first([b"unknown", b"h%d" % number])
        assert list(found.token_ids) == list(range(100 * (number + 1))) and found.num_messages == 2 * number + 2
    add(100, 20, KnownConversation(44, list(range(2101))))  # goes back
    assert lines.find_first([b"h39"]) is None  # two are too many: the older one went
    for number in range(200, 260):
        add(number, -1, KnownConversation(2, [number] * 500, b"o%d" % (number % 2)))
        assert lines.num_tokens <= 14_000
    assert lines.find_first([b"h200"]) is None and list(lines.find_first([b"h259"]).token_ids) == [259] * 500
    lines.forget_owner(b"o1")
    assert lines.find_first([b"h259"]) is None and lines.find_first([b"h258"]) is not None
    lines.forget_owner(b"o0")
    assert lines.num_tokens == 0 and lines.find_first([b"h%d" % number for number in range(300)]) is None


@pytest.mark.parametrize(("ids", "owner"), [([1, 9, 3, 4, 5], b""), ([1, 2, 3, 4, 5], b"o" * 16)])
def test_a_conversation_grows_only_as_what_it_was(ids, owner):
    lines = Lines(10_000)
    first, second = KnownConversation(2, [1, 2, 3]), KnownConversation(4, ids, owner)
    lines.add(b"h1", b"", first)
    lines.add(b"h2", b"h1", second)
    for name, expected in ((b"h1", first), (b"h2", second)):
        found = lines.find_first([name])
        assert (found.num_messages, list(found.token_ids), found.owner) == (
            expected.num_messages, expected.token_ids, expected.owner,
        )  # fmt: skip


def test_digests_tell_owners_and_messages_apart():
    keys = [Keys(root * 32, salt) for root in (b"a", b"b") for salt in ("", "x")]
    lists = [
        [user("a"), user("b")], [user("ab")], [user("a"), assistant("b")], [user("b"), user("a")],
        [user("a"), user("")], [{"role": "use", "content": "ra"}, user("b")],
    ]  # fmt: skip
    histories = [one.histories(one.marks(messages))[-1] for one in keys for messages in lists]
    assert len(set(histories)) == len(histories)
    assert len({one.text("a") for one in keys}) == len(keys)


def test_a_thought_that_was_cleared_names_another_history_and_one_that_is_not_sent_back_does_not():
    keys, answer = Keys(b"r" * 32, ""), {"role": "assistant", "content": "Yes."}
    assert keys.message(answer | {"reasoning_content": "Let me see."}) == keys.message(answer)
    assert keys.message(answer | {"reasoning_content": ""}) != keys.message(answer)
