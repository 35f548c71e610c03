"""The engine as a library: its public interface, and the invariants that hold without a store."""

import warnings
from operator import attrgetter

import pytest
import torch

from kvstore import CacheTiers, Engine, SamplingParams
from kvstore.errors import ConfigError, ContextLengthError, EngineClosedError, ModelError, RequestError
from tests.support.by_hand import by_hand
from tests.support.engines import Greedy, save_model
from tests.support.typing_in import type_in

GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPT = list(range(3, 60))
BLOCK_BYTES = 16 * 3 * 2 * 2 * 16 * 4  # tokens x layers x (K, V) x heads x head_dim x float32


@pytest.fixture(scope="module")
def chat_model(saved_model):
    return saved_model(tokenizer=True)


@pytest.fixture(scope="module")
def greedy():
    return Greedy()


@pytest.fixture
def engine(model):
    with Engine(model, max_num_batched_tokens=64, max_num_seqs=8) as engine:
        yield engine
        engine.check_integrity()


def test_outputs_have_everything_the_interface_promises(engine, greedy):
    (out,) = engine.generate([PROMPT], GREEDY)
    assert out.token_ids == greedy(PROMPT, 12)
    assert (out.finish_reason, out.text, out.prompt_token_ids) == ("length", "", PROMPT)
    assert out.ttft_s > 0 and len(out.choices) == 1 and out.choices[0].token_ids == out.token_ids
    assert (out.usage.prompt_tokens, out.usage.completion_tokens, out.usage.cached_tokens) == (57, 12, 0)


def test_a_returning_prompt_computes_only_what_is_new(engine, greedy):
    (first,) = engine.generate([PROMPT], GREEDY)
    longer = PROMPT + first.token_ids + [7, 8, 9]
    (second,) = engine.generate([longer], GREEDY)
    assert second.usage.cached_tokens == second.usage.cached_tokens_details.hbm == 64  # (57 + 11) // 16 * 16
    assert second.token_ids == greedy(longer, 12)


def test_another_salt_or_tenant_never_hits(engine):
    engine.generate([PROMPT], GREEDY)
    for owner in ({"cache_salt": "a"}, {"tenant": "a"}, {"tenant": "a", "cache_salt": "a"}):
        assert engine.generate([PROMPT], GREEDY, **owner)[0].usage.cached_tokens == 0
        assert engine.generate([PROMPT], GREEDY, **owner)[0].usage.cached_tokens == 48
    assert engine.generate([PROMPT], GREEDY)[0].usage.cached_tokens == 48


def test_invariant_1_same_tokens_cold_warm_mixed_and_preempted(model, greedy):
    """float32, greedy: whatever the batch, the chunks, the cache or the pool."""
    prompts = [PROMPT[:n] + [n] * m for n, m in ((40, 3), (40, 9), (8, 1), (50, 2), (33, 5), (1, 1))]
    expected = [greedy(prompt, 20) for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=20)
    settings = [{}, {"max_num_batched_tokens": 7}, {"max_num_seqs": 2}, {"block_size": 4}, {"block_size": 1}]
    settings.append({"cache_tiers": {"hbm": 9 * BLOCK_BYTES}, "max_num_batched_tokens": 24})
    for options in settings:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the small pool says that it is small
            engine = Engine(model, **options)
        with engine:
            for _ in range(2):  # cold, then warm
                outs = engine.generate(prompts, params)
                assert [out.token_ids for out in outs] == expected, options
            assert [engine.generate([p], params)[0].token_ids for p in prompts] == expected, options
            engine.check_integrity()
            if "cache_tiers" in options:
                assert engine.stats()["requests"]["preemptions"] > 0


def test_choices_share_the_prompt_which_is_computed_once(engine, greedy):
    computed = []
    schedule = engine.loop.scheduler.schedule

    def counting():
        output = schedule()
        computed.append(output.num_tokens)
        return output

    engine.loop.scheduler.schedule = counting
    params = SamplingParams(n=4, temperature=1.0, seed=5, max_tokens=6, min_tokens=6)
    (out,) = engine.generate([PROMPT], params)
    assert sum(computed) == len(PROMPT) + 4 * 5  # the last token of each choice is never computed
    assert len({tuple(choice.token_ids) for choice in out.choices}) == 4
    assert out.usage.completion_tokens == 24
    for index, choice in enumerate(out.choices):
        alone = SamplingParams(temperature=1.0, seed=5 + index, max_tokens=6, min_tokens=6)
        assert engine.generate([PROMPT], alone)[0].token_ids == choice.token_ids


def test_logprobs_are_those_of_the_model(engine):
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2)
    (out,) = engine.generate([PROMPT], params)
    network = Greedy().network
    ids = torch.tensor([PROMPT + out.token_ids])
    expected = network(input_ids=ids).logits[0].log_softmax(-1)
    for i, entry in enumerate(out.choices[0].logprobs):
        row = expected[len(PROMPT) - 1 + i]
        assert entry.token_id == out.token_ids[i]
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-3)
        assert list(entry.top) == row.topk(2).indices.tolist()
    n_params = SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=2, logprobs=0)
    for choice in engine.generate([PROMPT], n_params)[0].choices:
        assert [entry.token_id for entry in choice.logprobs] == choice.token_ids


def test_over_length_is_refused_with_both_numbers(engine):
    with pytest.raises(ContextLengthError, match=r"256 tokens.*256"):
        engine.generate([[1] * 256], GREEDY)
    (out,) = engine.generate([[1] * 255], SamplingParams(temperature=0))
    assert len(out.token_ids) == 1 and out.finish_reason == "length"


@pytest.mark.parametrize("max_tokens", [12, 2**31])
def test_max_tokens_is_an_upper_bound_and_the_output_says_what_it_came_to(engine, max_tokens):
    fits, capped = engine.generate(
        [[1] * 244, [1] * 250], SamplingParams(temperature=0, max_tokens=max_tokens, n=2, ignore_eos=True)
    )
    for out, num_left in ((fits, 12), (capped, 6)):
        assert [(len(one.token_ids), one.finish_reason) for one in out.choices] == [(num_left, "length")] * 2
    assert fits.usage.capped_max_tokens == (None if max_tokens == 12 else 12)
    assert (capped.usage.capped_max_tokens, capped.usage.completion_tokens) == (6, 12)


def test_a_pool_smaller_than_the_window_warns_and_refuses_only_what_cannot_fit(model, greedy):
    with pytest.warns(UserWarning, match="HBM pool holds 64 tokens"):
        engine = Engine(model, cache_tiers={"hbm": 4 * BLOCK_BYTES})
    with engine:
        with pytest.raises(ContextLengthError, match="HBM pool holds 64"):
            engine.generate([PROMPT * 2], GREEDY)
        assert engine.generate([PROMPT[:50]], GREEDY)[0].token_ids == greedy(PROMPT[:50], 12)


def test_bad_prompts_and_options_say_what_to_do(engine, model):
    for prompts in ([[]], [[160]], [[-1]], [["a"]], ["text without a tokenizer"], [1, 2, 3]):
        with pytest.raises(RequestError):
            engine.generate(prompts, GREEDY)
    with pytest.raises(RequestError, match="2 prompts, but 1"):
        engine.generate([[1], [2]], [GREEDY])
    with pytest.raises(ConfigError, match="max_num_seqs is 0"):
        Engine(model, max_num_seqs=0)
    with pytest.raises(ConfigError, match="made for 256"):
        Engine(model, max_model_len=257)
    with pytest.raises(ConfigError, match="unknown names"):
        Engine(model, cache_tiers={"gpu": 1})
    with pytest.raises(ConfigError, match="one block of this model needs"):
        Engine(model, cache_tiers=CacheTiers(hbm=1000))
    assert engine.generate([[1, 2]], GREEDY)[0].finish_reason == "length"  # still well


def test_a_wrong_prompt_among_good_ones_runs_none(engine):
    before = engine.stats()["step"]["num_steps"]
    with pytest.raises(ContextLengthError):
        engine.generate([[1, 2], [1] * 300], GREEDY)
    assert engine.stats()["step"]["num_steps"] == before and not engine.has_work


def test_models_that_cannot_be_loaded(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"no \*\.safetensors"):
        Engine(tmp_path / "empty")
    with pytest.raises(ModelError, match="not a directory"):
        Engine("./does-not-exist")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA"):
            Engine(device="cuda")


def test_stop_strings_and_ids(chat_model):
    with Engine(chat_model) as engine:
        (out,) = engine.generate(["Hello there"], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
        text = out.text
        middle = text[len(text) // 2 : len(text) // 2 + 3]
        (cut,) = engine.generate(
            ["Hello there"], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop=[middle])
        )
        assert cut.text == text[: text.index(middle)]
        assert (cut.finish_reason, cut.choices[0].stop_reason) == ("stop", middle)
        assert len(cut.token_ids) < 30 and cut.token_ids == out.token_ids[: len(cut.token_ids)]
        stop_id = out.token_ids[4]
        (cut,) = engine.generate(
            ["Hello there"], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop_token_ids=[stop_id])
        )
        first = out.token_ids.index(stop_id)
        assert cut.token_ids == out.token_ids[: first + 1] and cut.choices[0].stop_reason == stop_id
        assert out.text.startswith(cut.text)
        assert not engine.has_work
        engine.check_integrity()


def test_min_tokens_holds_back_eos_and_stop_strings(chat_model):
    with Engine(chat_model) as engine:
        plain = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        (out,) = engine.generate(["Hello"], plain)
        first = next(piece for piece in out.text if piece.strip())
        params = SamplingParams(temperature=0, max_tokens=20, min_tokens=15, ignore_eos=True, stop=[first])
        (held,) = engine.generate(["Hello"], params)
        assert len(held.token_ids) >= 15
        bias = {engine.tokenizer.eos_token_id: 100.0}
        (out,) = engine.generate(["Hello"], SamplingParams(temperature=0, max_tokens=20, logit_bias=bias))
        assert len(out.token_ids) == 1 and out.finish_reason == "stop" and out.text == ""
        params = SamplingParams(temperature=0, max_tokens=20, min_tokens=5, logit_bias=bias)
        (out,) = engine.generate(["Hello"], params)
        assert len(out.token_ids) == 6 and out.finish_reason == "stop"


def test_ids_beyond_the_tokenizer_are_the_models_and_decode_to_nothing(chat_model):
    with Engine(chat_model) as engine:
        padded = engine.facts.vocab_size - 1
        assert padded >= len(engine.tokenizer)
        params = SamplingParams(temperature=0, max_tokens=3, logit_bias={padded: 100.0})
        (out,) = engine.generate([[padded, 5]], params)
        assert out.token_ids == [padded] * 3 and out.text == ""


def test_streams_join_to_the_whole_text_and_leaving_aborts(chat_model):
    with Engine(chat_model) as engine:
        params = SamplingParams(temperature=0, max_tokens=25, ignore_eos=True)
        (whole,) = engine.generate(["Hello"], params)
        ids = engine.tokenizer("Hello")["input_ids"]
        pieces = list(engine.stream(engine.submit(ids, params)))
        assert "".join(piece.text for piece in pieces) == whole.text
        assert [t for piece in pieces for t in piece.token_ids] == whole.token_ids
        assert [piece.finish_reason for piece in pieces][-1] == "length"
        handle = engine.submit(ids, params)
        for count, _ in enumerate(engine.stream(handle)):
            if count == 3:
                break
        assert handle.done and handle.output.finish_reason == "abort"
        assert not engine.generate([[5]], GREEDY)[0].usage.cached_tokens
        engine.check_integrity()


def test_priority_goes_first_when_asked(model):
    with by_hand(Engine(model, max_num_seqs=1, policy="priority")) as engine:
        handles = [engine.submit([i + 1] * 5, GREEDY, priority=p) for i, p in enumerate((5, 1, 3))]
        ended = []
        while engine.has_work:
            engine.step()
            ended += [n for n, handle in enumerate(handles) if handle.done and n not in ended]
    assert ended == [1, 2, 0]


def test_close_ends_everything_and_may_be_repeated(model):
    engine = by_hand(Engine(model))
    handle = engine.submit(PROMPT, GREEDY)
    engine.step()
    engine.close()
    engine.close()
    assert handle.done and handle.output.finish_reason == "abort"
    with pytest.raises(EngineClosedError):
        engine.generate([PROMPT], GREEDY)


def test_stats_count_requests_and_tokens(engine):
    engine.generate([PROMPT, PROMPT], SamplingParams(temperature=0, max_tokens=2))
    engine.generate([PROMPT], SamplingParams(temperature=0, max_tokens=2))
    stats = engine.stats()
    assert stats["requests"]["finished"] == 3
    assert stats["tokens"].pop("cached_by_tier") == {"hbm": 48, "cpu": 0, "disk": 0, "remote": 0, "reencoded": 0}
    assert stats["tokens"] == {"prompt_tokens": 171, "cached_tokens": 48, "completion_tokens": 6}
    assert stats["step"]["num_steps"] > 0 and stats["step"]["forward_s"] > 0


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
def test_an_error_at_any_stage_ends_what_runs_and_nothing_else(model, greedy, owner, method):
    with Engine(model) as engine:
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
        assert [out.token_ids for out in outs] == [greedy(PROMPT, 12), greedy(PROMPT[:20], 12)]


def test_wrong_types_are_request_errors(engine):
    for arguments in ({"tenant": None}, {"cache_salt": 5}, {"priority": "a"}):
        with pytest.raises(RequestError, match=next(iter(arguments))):
            engine.generate([PROMPT], GREEDY, **arguments)
    for params in ({"max_tokens": 2}, 5, [None]):
        with pytest.raises(RequestError, match="give SamplingParams"):
            engine.generate([PROMPT], params)
    with pytest.raises(RequestError, match="list of prompts"):
        engine.generate({"prompt": "x"}, GREEDY)
    with pytest.raises(RequestError, match="from 0 to 159"):
        engine.submit([99999], GREEDY)
    for wrong in (5, b"x"):
        with pytest.raises(ConfigError, match="model is"):
            Engine(wrong)
    with pytest.raises(ModelError, match="is not a directory"):
        Engine("~nosuchuser/x")


def test_a_models_own_code_is_never_run(tmp_path, monkeypatch):
    import json
    import pathlib

    folder = pathlib.Path(save_model(tmp_path / "m"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    type_in(monkeypatch, "y", "y", "y")
    with pytest.raises(ModelError):
        Engine(folder)
    assert not (tmp_path / "ran").exists()


def test_aborted_requests_are_counted(engine):
    by_hand(engine)
    handle = engine.submit(PROMPT, GREEDY)
    engine.step()
    engine.abort(handle)
    engine.abort(handle)
    assert engine.stats()["requests"]["aborted"] == 1 and engine.stats()["requests"]["finished"] == 0


@pytest.mark.parametrize("kind", ["async", "daemon"])
def test_an_engine_never_closed_neither_hangs_nor_crashes_the_exit(model, kind):
    program = f"""
import asyncio, threading, time
from kvstore import AsyncEngine, Engine, SamplingParams
engine = Engine({model!r})
long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
if {kind!r} == "async":
    served = AsyncEngine(engine)
    async def main():
        task = asyncio.ensure_future(served.generate([1, 2, 3], long))
        await asyncio.sleep(0.05)
    asyncio.run(main())
    threading.Thread(target=lambda: asyncio.run(served.generate([5] * 50, long)), daemon=True).start()
else:
    def work():
        while True:
            engine.generate([[1, 2, 3]], long)
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.1)
"""
    import pathlib
    import subprocess
    import sys

    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
