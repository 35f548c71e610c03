"""What do constrained answers cost: the first mask, eight rows of a step, and hostile grammars beside another stream?

One process. The vocabulary is made up: pairs of the built-in tokenizer's tokens. The stream is the built-in model's.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import numpy as np

from bench.common import Report, alternate, arguments, median, run, spread

NUM_ROWS, PAUSE_S = 8, 0.1
TYPES: tuple[tuple[str, Any], ...] = (
    ("string", "a word or two"),
    ("integer", 4711),
    ("boolean", True),
    ("number", 2.5),
)
ITEMS = {f"field_{index}": TYPES[index % len(TYPES)] for index in range(60)}
FIELDS = {
    "type": "object", "properties": {name: {"type": kind} for name, (kind, _) in ITEMS.items()},
    "required": list(ITEMS), "additionalProperties": False,
}  # fmt: skip
ANSWER = json.dumps({name: value for name, (_, value) in ITEMS.items()}, separators=(",", ":"))


def strings(count: int) -> dict[str, Any]:
    return {f"p{index}": {"type": "string"} for index in range(count)}


CHAIN = {f"d{index}": {"items": {"$ref": f"#/$defs/d{index + 1}"}} for index in range(1400)}
HOSTILE: dict[str, dict[str, Any]] = {
    "arrays 3,000 deep": {"json": '{"items":' * 3000 + "{}" + "}" * 3000},
    "2,000 optional properties": {"json": json.dumps({"properties": strings(2000)}, separators=(",", ":"))},
    "1,000 optional properties": {"json": {"properties": strings(1000)}},
    "1,500 required properties": {"json": {"properties": strings(1500), "required": list(strings(1500))}},
    "an enum of 7,000": {"json": {"enum": list(strings(7000))}},
    "7,000 choices": {"choice": list(strings(7000))},
    "a chain of 1,400 references": {"json": {"$ref": "#/$defs/d0", "$defs": {**CHAIN, "d1400": {"const": 1}}}},
    "200 addresses": {"json": {"properties": {name: {"type": "string", "format": "uri"} for name in strings(200)}}},
    "a text of 60,000": {"json": {"const": "x" * 60000}},
    "(a{1000}){1000}": {"regex": "(a{1000}){1000}"},
    "(x+x+)+y": {"regex": "((x+x+)+y){200}"},
    "an intersection": {"grammar": "start: X\nX: /(.*a.{20})/ & /(.*b.{18})/ & ~/(.*c.{15})/"},
    "a schema that is itself": {"json": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}},
    "20,000 brackets": {"grammar": "start: " + "(" * 20000 + '"a"' + ")" * 20000},
}


def made_up_tokenizer(vocab_size: int) -> Any:
    """The built-in tokenizer's tokens, pairs of them, and an end token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    from kvstore.engine.builtin import MODEL_DIR

    known = json.loads((MODEL_DIR / "tokenizer.json").read_text())["model"]["vocab"]
    words = [word for word in known if not word.startswith("<")]
    vocab = dict.fromkeys([*sorted(pre_tokenizers.ByteLevel.alphabet()), *words])
    rng = random.Random(0)
    while len(vocab) < vocab_size - 1:
        vocab["".join(rng.choices(words, k=2))] = None
    backend = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(vocab)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    return SimpleNamespace(backend_tokenizer=backend, added_tokens_decoder=backend.get_added_tokens_decoder())


def compiled(compiler: Any, wanted: Any) -> Any:
    """The matcher, made anew."""
    from kvstore import SamplingParams
    from kvstore.blocks.ids import Lineage
    from kvstore.engine.core.request import Request

    compiler.kept.clear()
    request, done = Request("", [1], SamplingParams(structured_outputs=wanted), 8, Lineage(bytes(32)), 4, 0), Event()
    compiler.prepare(request, lambda *_: done.set())
    done.wait()
    return request.matcher


class Rows:
    """Greedy rows of a batch. Those with a matcher are at different places of one answer."""

    def __init__(self, vocab_size: int, eos_token_id: int, matcher: Any, answer: list[int]) -> None:
        import torch

        from kvstore import SamplingParams
        from kvstore.engine.model.step.sampler import Sampler

        self.sampler, none = Sampler(NUM_ROWS, vocab_size, torch.device("cpu")), np.array([], np.int64)
        self.logits, self.rest = torch.randn(NUM_ROWS, vocab_size), [answer[11 * row :] for row in range(NUM_ROWS)]
        self.answer, self.matchers = answer, [matcher and matcher.deep_copy() for _ in range(NUM_ROWS)]
        for row, mine in enumerate(self.matchers):
            self.sampler.set_row(row, SamplingParams(temperature=0), row, [eos_token_id], none, none, mine)
            if mine is not None:
                mine.consume_tokens(answer[: 11 * row])

    def step_s(self) -> float:
        began = time.perf_counter()
        self.sampler.sample(self.logits, np.arange(NUM_ROWS))
        seconds = time.perf_counter() - began
        for row, mine in enumerate(self.matchers):
            if mine is not None:
                if not self.rest[row]:
                    mine.reset()
                    self.rest[row] = self.answer
                mine.consume_token(self.rest[row][0])
                self.rest[row] = self.rest[row][1:]
        return seconds


def masks(parsed: argparse.Namespace, repeats: int, report: Report) -> None:
    from llguidance import LLTokenizer

    from kvstore import StructuredOutputsParams
    from kvstore.engine.text.compiler import GrammarCompiler

    tokenizer = made_up_tokenizer(parsed.vocab_size)
    backend = tokenizer.backend_tokenizer.to_str()
    eos = parsed.vocab_size - 1
    compiler, wanted = GrammarCompiler(tokenizer, {eos}, parsed.vocab_size), StructuredOutputsParams(json=FIELDS)
    try:
        matcher = compiled(compiler, wanted)
        firsts = alternate({"ours": lambda: elapsed_s(lambda: compiled(compiler, wanted))}, repeats)["ours"]
    finally:
        compiler.close()
    report.add(
        what="60 fields to the first mask",
        ms=1000 * median(firsts),
        best=1000 * min(firsts),
        goal="<= 5 ms",
        spread=spread(firsts),
    )
    answer = LLTokenizer(backend, n_vocab=parsed.vocab_size, eos_token=eos).tokenize_str(ANSWER)
    ways = {name: Rows(parsed.vocab_size, eos, mine, answer) for name, mine in (("with", matcher), ("without", None))}
    times = alternate({name: rows.step_s for name, rows in ways.items()}, 20 * repeats)
    more, least = (1000 * (of(times["with"]) - of(times["without"])) for of in (median, min))
    what = f"{NUM_ROWS} rows of {parsed.vocab_size:,}, more a step"
    report.add(what=what, ms=more, best=least, goal="<= 0.3 ms", spread=spread(times["with"]))


def elapsed_s(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class Stream:
    """An answer of the built-in model after another, and when their tokens came."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._ended, self.times = engine, Event(), list[float]()
        self._thread = Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        from kvstore import SamplingParams

        while not self._ended.is_set():
            handle = self._engine.submit([7], SamplingParams(temperature=0, max_tokens=900, ignore_eos=True))
            for _ in self._engine.stream(handle):
                self.times.append(time.perf_counter())
                if self._ended.is_set():
                    break

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def gaps_s(self, began: float, ended: float) -> list[float]:
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False) if a >= began and b <= ended]


def hostile(repeats: int, report: Report) -> None:
    from kvstore import Engine, KVStoreError, SamplingParams, StructuredOutputsParams

    def ask(given: dict[str, Any]) -> str:
        try:
            wanted = StructuredOutputsParams(**given)
            engine.generate([[7]], SamplingParams(max_tokens=1, structured_outputs=wanted))
        except KVStoreError:
            return "refused"
        return "answered"

    with Engine(device="cpu", process="here") as engine:
        core: Any = engine.core
        stream, quiet, beside = Stream(engine), list[float](), list[float]()
        try:
            for name, given in HOSTILE.items():
                times = list[float]()
                for _ in range(repeats):
                    core.compiler.kept.clear()
                    began = time.perf_counter()
                    time.sleep(PAUSE_S)
                    asked = time.perf_counter()
                    outcome = ask(given)
                    ended = time.perf_counter()
                    times.append(ended - asked)
                    quiet += stream.gaps_s(began, asked)
                    beside += stream.gaps_s(asked, ended)
                report.add(
                    what=name, ms=1000 * median(times), best=1000 * min(times), goal="<= 200 ms", spread=spread(times),
                    outcome=outcome,
                )  # fmt: skip
        finally:
            stream.end()
    report.add(what="between another stream's tokens", ms=1000 * median(quiet), spread=spread(quiet))
    slower = f"{median(beside) / median(quiet):.2f} times"
    report.add(what="the same during these", ms=1000 * median(beside), goal="< 1.1 times", outcome=slower)


def body(parsed: argparse.Namespace, report: Report) -> None:
    repeats = 2 if parsed.quick else parsed.repeats
    masks(parsed, repeats, report)
    hostile(repeats, report)


def main() -> int:
    parser = arguments("grammars", __doc__.split("\n")[0])
    parser.add_argument("--vocab-size", type=int, default=131_072, metavar="N", help="tokens (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=10, help="measurements of each kind (default: 10)")
    return run(body, parser.parse_args(), "Constrained answers; medians")


if __name__ == "__main__":
    sys.exit(main())
