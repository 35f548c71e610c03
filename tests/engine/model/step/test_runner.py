"""Steps of a model: which thread runs them, and what becomes of one that nobody reads."""

import threading

from kvstore.engine.model.step.runner import ModelRunner
from tests.support.engines import ask, greedy, open_engine, save_model, tokens
from tests.support.faults import before_each_step


def test_the_thread_that_steps_is_the_one_that_is_warmed_up(tmp_path, monkeypatch):
    """cuBLAS keeps a handle and a workspace for each thread: the first request would wait for them."""
    threads, prepare = [], ModelRunner.prepare

    def note(runner=None):
        threads.append(threading.current_thread().name)
        return runner and prepare(runner)

    monkeypatch.setattr(ModelRunner, "prepare", note)
    with open_engine(save_model(tmp_path)) as engine, before_each_step(engine, note):
        assert len(engine.generate([tokens(1, 20)], greedy(5))[0].token_ids) == 5
    assert len(threads) == 6 and set(threads) == {"kvstore-engine"}


class Mark:
    """A time on a device's clock that counts the steps."""

    def __init__(self, log: list, number: int) -> None:
        self._log, self.number = log, number

    def synchronize(self) -> None:
        self._log.append(("waited for", self.number))

    def elapsed_time(self, end: "Mark") -> float:
        return 1000.0 * (end.number - self.number)


def test_a_step_that_samples_nothing_is_waited_for_and_timed_by_the_next(model, monkeypatch):
    """Else a long prompt would be queued whole, and all of its activations kept alive for their saves."""
    log: list[object] = []
    with open_engine(model, max_num_batched_tokens=32) as engine:
        runner, forward = engine.loop.runner, engine.loop.runner._forward
        marks = iter(range(100))
        monkeypatch.setattr(runner.clock, "mark", lambda: Mark(log, next(marks)))
        monkeypatch.setattr(runner, "_forward", lambda *step: (log.append("forward"), forward(*step))[1])
        get_finished = engine.connector.get_finished

        def logged(prefilled):
            log.extend((step.num_tokens, step.seconds) for step in prefilled)
            return get_finished(prefilled)

        monkeypatch.setattr(engine.connector, "get_finished", logged)
        ask(engine, tokens(800, 100), 2)
    assert log == [
        "forward", ("waited for", 1), "forward", ("waited for", 3), "forward", (32, 1.0), ("waited for", 5), "forward",
        ("waited for", 7), (32, 1.0), (4, 1.0), "forward", ("waited for", 9),
    ]  # fmt: skip
