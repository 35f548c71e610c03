"""Engines embedded in a worker process, as sides of a comparison. Questions and answers are one JSON line each.

`Embedded` is this process' end of the pipe, `work` the other. That one may run in a peer's environment, which has none
of this project's packages.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from bench.peers.load import Answer, PeerError

STOP_S = 60.0
ROOT = Path(__file__).parents[2]


class Worker(Protocol):
    """What a worker process does: the verbs of `Side`, without its processes."""

    def ask(self, prompts: list[list[int]], max_tokens: int, talk: str) -> list[Answer]: ...

    def leave(self, talk: str, keep: bool) -> None: ...

    def close(self) -> None: ...


def work(make: Callable[[Path, Path, int], Worker]) -> None:
    """Run a worker. Its arguments are the model, a directory of its own and the number of threads."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # so that the output of libraries is not taken for replies
    model, folder, threads = sys.argv[1:]
    worker = make(Path(model), Path(folder), int(threads))
    print(json.dumps([]), file=replies, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        answers: list[Answer] = []
        if "ask" in asked:
            answers = worker.ask(**asked["ask"])
        else:
            worker.leave(**asked["leave"])
        print(json.dumps([asdict(answer) for answer in answers]), file=replies, flush=True)
    worker.close()


@dataclass(slots=True)
class Embedded:
    """A side whose engine is in a worker process of the given python."""

    name: str
    python: Path
    module: str
    model: Path
    folder: Path
    threads: int
    log: Path
    _process: subprocess.Popen[str] | None = None

    @property
    def settings(self) -> list[list[str]]:
        return [[str(self.python), "-m", self.module, str(self.model), str(self.folder), str(self.threads)]]

    def start(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(self.threads), "HF_HUB_OFFLINE": "1"}
        environment["PYTHONPATH"] = str(ROOT)
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(
                self.settings[0], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out, env=environment, text=True
            )
        self._reply()

    def stop(self) -> None:
        if self._process is None:
            return
        try:
            self._process.communicate(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        self._process = None

    def ask(self, prompts: Sequence[list[int]], max_tokens: int, talk: str = "") -> list[Answer]:
        answers = self._call(ask={"prompts": prompts, "max_tokens": max_tokens, "talk": talk})
        return [Answer(**answer) for answer in answers]

    def leave(self, talk: str, keep: bool) -> None:
        self._call(leave={"talk": talk, "keep": keep})

    def _call(self, **asked: Any) -> Any:
        assert self._process is not None and self._process.stdin is not None
        with suppress(OSError):  # if it has ended, the missing reply tells
            print(json.dumps(asked), file=self._process.stdin, flush=True)
        return self._reply()

    def _reply(self) -> Any:
        assert self._process is not None and self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"{self.name} has ended; its log: {self.log}")
        return json.loads(line)
