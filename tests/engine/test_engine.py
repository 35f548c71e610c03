"""The engine as a library: its public interface, and the invariants that hold without a store."""

import json
import pathlib
import subprocess
import sys
from operator import attrgetter

import pytest
import torch

from kvstore import Engine, SamplingParams
from kvstore.errors import ConfigError, ContextLengthError, ModelError, RequestError
from tests.support.by_hand import by_hand
from tests.support.engines import save_model
from tests.support.typing_in import type_in

GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPT = list(range(3, 60))


@pytest.fixture(scope="module")
def talking(saved_model):
    """An engine whose model has a tokenizer."""
    with Engine(saved_model(tokenizer=True)) as engine:
        yield engine
        assert not engine.has_work
        engine.check_integrity()


@pytest.fixture(scope="module")
def engine_of_all(model):
    with Engine(model, max_num_batched_tokens=64, max_num_seqs=8) as engine:
        yield engine


@pytest.fixture
def engine(engine_of_all):
    """Nothing is cached."""
    engine_of_all.loop.call(engine_of_all.loop.pool.evict_all)
    yield engine_of_all
    assert not engine_of_all.has_work
    engine_of_all.check_integrity()


def test_outputs_have_everything_the_interface_promises(engine, plain):
    (out,) = engine.generate([PROMPT], GREEDY)
    assert out.token_ids == plain(PROMPT, 12)
    assert (out.finish_reason, out.text, out.prompt_token_ids) == ("length", "", PROMPT)
    assert out.ttft_s > 0 and len(out.choices) == 1 and out.choices[0].token_ids == out.token_ids
    assert (out.usage.prompt_tokens, out.usage.completion_tokens, out.usage.cached_tokens) == (57, 12, 0)


def test_bad_prompts_and_options_say_what_to_do(engine, model):
    for arguments in ({"tenant": None}, {"cache_salt": 5}, {"priority": "a"}, {"priority": 2**70}):
        with pytest.raises(RequestError, match=next(iter(arguments))):
            engine.generate([PROMPT], GREEDY, **arguments)
    for params in ({"max_tokens": 2}, 5, [None]):
        with pytest.raises(RequestError, match="give SamplingParams"):
            engine.generate([PROMPT], params)
    for prompts in ([[]], [[160]], [[-1]], [["a"]], ["text without a tokenizer"], [1, 2, 3], {"prompt": "x"}):
        with pytest.raises(RequestError):
            engine.generate(prompts, GREEDY)
    with pytest.raises(RequestError, match="from 0 to 159"):
        engine.submit([99999], GREEDY)
    wrong = {"max_num_seqs is 0": {"max_num_seqs": 0}, "made for 256": {"max_model_len": 257}}
    wrong |= {
        "unknown names": {"cache_tiers": {"gpu": 1}},
        "one block of this model needs": {"cache_tiers": {"hbm": 1000}},
    }
    wrong |= {} if torch.cuda.is_available() else {"no CUDA": {"device": "cuda"}}
    for words, options in wrong.items():
        with pytest.raises(ConfigError, match=words):
            Engine(model, **options)
    for no_name in (5, b"x"):
        with pytest.raises(ConfigError, match="model is"):
            Engine(no_name)
    assert engine.generate([[1, 2]], GREEDY)[0].finish_reason == "length"  # still well


def test_a_wrong_prompt_among_good_ones_runs_none(engine):
    before = engine.stats()["step"]["num_steps"]
    with pytest.raises(ContextLengthError):
        engine.generate([[1, 2], [1] * 300], GREEDY)
    assert engine.stats()["step"]["num_steps"] == before and not engine.has_work


def test_stop_strings_and_ids(talking):
    (out,) = talking.generate(["Hello there"], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    text = out.text
    middle = text[len(text) // 2 : len(text) // 2 + 3]
    (cut,) = talking.generate(
        ["Hello there"], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop=[middle])
    )
    assert cut.text == text[: text.index(middle)]
    assert (cut.finish_reason, cut.choices[0].stop_reason) == ("stop", middle)
    assert len(cut.token_ids) < 30 and cut.token_ids == out.token_ids[: len(cut.token_ids)]
    stop_id = out.token_ids[4]
    (cut,) = talking.generate(
        ["Hello there"], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop_token_ids=[stop_id])
    )
    first = out.token_ids.index(stop_id)
    assert cut.token_ids == out.token_ids[: first + 1] and cut.choices[0].stop_reason == stop_id
    assert out.text.startswith(cut.text)


def test_min_tokens_holds_back_eos_and_stop_strings(talking):
    plain = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    (out,) = talking.generate(["Hello"], plain)
    first = next(piece for piece in out.text if piece.strip())
    params = SamplingParams(temperature=0, max_tokens=20, min_tokens=15, ignore_eos=True, stop=[first])
    (held,) = talking.generate(["Hello"], params)
    assert len(held.token_ids) >= 15
    bias = {talking.tokenizer.eos_token_id: 100.0}
    (out,) = talking.generate(["Hello"], SamplingParams(temperature=0, max_tokens=20, logit_bias=bias))
    assert len(out.token_ids) == 1 and out.finish_reason == "stop" and out.text == ""
    params = SamplingParams(temperature=0, max_tokens=20, min_tokens=5, logit_bias=bias)
    (out,) = talking.generate(["Hello"], params)
    assert len(out.token_ids) == 6 and out.finish_reason == "stop"


def test_ids_beyond_the_tokenizer_are_the_models_and_decode_to_nothing(talking):
    padded = talking.facts.vocab_size - 1
    assert padded >= len(talking.tokenizer)
    params = SamplingParams(temperature=0, max_tokens=3, logit_bias={padded: 100.0})
    (out,) = talking.generate([[padded, 5]], params)
    assert out.token_ids == [padded] * 3 and out.text == ""


def test_streams_join_to_the_whole_text_and_leaving_aborts(talking):
    params = SamplingParams(temperature=0, max_tokens=25, ignore_eos=True)
    (whole,) = talking.generate(["Hello"], params)
    ids = talking.tokenizer("Hello")["input_ids"]
    pieces = list(talking.stream(talking.submit(ids, params)))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [t for piece in pieces for t in piece.token_ids] == whole.token_ids
    assert [piece.finish_reason for piece in pieces][-1] == "length"
    handle = talking.submit(ids, params)
    for count, _ in enumerate(talking.stream(handle)):
        if count == 3:
            break
    assert handle.done and handle.output.finish_reason == "abort"
    assert not talking.generate([[5]], GREEDY)[0].usage.cached_tokens


def test_priority_goes_first_when_asked(model):
    with by_hand(Engine(model, max_num_seqs=1, policy="priority")) as engine:
        handles = [engine.submit([i + 1] * 5, GREEDY, priority=p) for i, p in enumerate((5, 1, 3))]
        ended = []
        while engine.has_work:
            engine.step()
            ended += [n for n, handle in enumerate(handles) if handle.done and n not in ended]
    assert ended == [1, 2, 0]


def test_stats_count_requests_and_tokens(model):
    with by_hand(Engine(model)) as engine:
        engine.generate([PROMPT, PROMPT], SamplingParams(temperature=0, max_tokens=2))
        engine.generate([PROMPT], SamplingParams(temperature=0, max_tokens=2))
        stats = engine.stats()
        assert stats["requests"]["finished"] == 3
        assert stats["tokens"].pop("cached_by_tier") == {
            "hbm": 48, "cpu": 0, "disk": 0, "remote": 0, "reencoded": 0, "quantised": 0,
        }  # fmt: skip
        assert stats["tokens"] == {"prompt_tokens": 171, "cached_tokens": 48, "completion_tokens": 6}
        assert stats["step"]["num_steps"] > 0 and stats["step"]["forward_s"] > 0
        handle = engine.submit(PROMPT, GREEDY)
        engine.step()
        engine.abort(handle)
        engine.abort(handle)
        requests = engine.stats()["requests"]
        assert (requests["aborted"], requests["finished"]) == (1, 3)


@pytest.mark.parametrize(
    ("owner", "method"),
    [
        ("scheduler", "schedule"),
        ("connector", "build_connector_meta"),
        ("runner", "_update_rows"),
        ("runner", "_draw"),
        ("runner.model", "begin"),
        ("runner.sampler", "set_row"),
        ("scheduler", "update"),
        ("news", "say"),
        ("news", "add"),
        ("scheduler.roster", "add"),
    ],
)
def test_an_error_at_any_stage_ends_what_runs_and_nothing_else(engine, plain, owner, method):
    part = attrgetter(owner)(engine.loop)
    original, calls = getattr(part, method), []

    def broken(*args, **options):
        calls.append(1)
        if len(calls) == 2:
            original(*args, **options)  # the worst case: its effects are there, its result is not
            raise OSError("injected")
        return original(*args, **options)

    setattr(part, method, broken)
    with pytest.raises(OSError):
        engine.generate([PROMPT, PROMPT[:20]], GREEDY)
    setattr(part, method, original)
    engine.check_integrity()
    assert not engine.has_work and engine.stats()["hbm"]["free_blocks"] == engine.stats()["hbm"]["blocks"]
    outs = engine.generate([PROMPT, PROMPT[:20]], GREEDY)
    assert [out.token_ids for out in outs] == [plain(PROMPT, 12), plain(PROMPT[:20], 12)]


def test_a_models_own_code_is_never_run(tmp_path, monkeypatch):
    folder = pathlib.Path(save_model(tmp_path / "m"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    type_in(monkeypatch, "y", "y", "y")
    with pytest.raises(ModelError):
        Engine(folder)
    assert not (tmp_path / "ran").exists()


def test_engines_never_closed_neither_hang_nor_crash_the_exit(model):
    command = [sys.executable, "-m", "tests.children.never_closed", model]
    done = subprocess.run(command, cwd=pathlib.Path(__file__).parents[2], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
