"""One round, from its script: who talks, what befalls the servers, what must be true afterwards.

The script follows from the campaign's seed and the round's number alone; how the clients interleave is chance.
"""

from __future__ import annotations

import random
import resource
import signal
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.campaign.reference import Reference, save_model
from bench.campaign.servers import (
    Failure,
    Node,
    RedisNode,
    expect,
    flip,
    run_command,
    start_command,
    wait_until,
)
from bench.campaign.talks import Client, Progress, Talk, check_transcript

NUM_CLIENTS, SHORT_WINDOW, WINDOW = 4, 256, 1024
DURABLE = ("--appendonly", "yes", "--appendfsync", "always")
ALONE = {  # what befalls a server, and how often
    "calm": 1, "kill": 6, "kill after a turn": 4, "kill at the start": 2, "kill the engine": 3, "stop the engine": 2,
    "stop the server": 2, "end": 3, "flipped bytes": 3, "disk full": 3, "kill compact": 2,
}  # fmt: skip
SHARED = {  # what befalls two servers and their Redis
    "kill": 3, "kill after a turn": 2, "end": 1, "stop the server": 1, "flipped bytes": 1, "sessions' Redis killed": 3,
    "sessions' Redis stopped": 2, "KV's Redis restarted empty": 3, "KV's Redis stopped": 2,
}  # fmt: skip
ARMS = {"plain": 3, "short": 2, "states": 3, "windows": 3, "shared": 3, "shared states": 1}  # and how often


@dataclass(frozen=True)
class Script:
    """What a round does. pieces: of answers that come before the fault; turns: that do, for a kill right after one.
    part: of a start or a compaction, after which its process is killed; of a file, behind which nothing is written.
    pause_s: how long something is stopped. flips: bits, at most. live: what the owner of a store is asked for.
    """

    seed: int
    number: int
    arm: str
    fault: str
    pieces: int
    turns: int
    part: float
    pause_s: float
    num_actions: int
    flips: int
    disk: str
    live: str
    ending: str
    compacts: bool

    @classmethod
    def of(cls, seed: int, number: int, arms: Sequence[str], num_actions: int) -> Script:
        rng = random.Random(f"{seed}:{number}")
        (arm,) = rng.choices(arms, [ARMS[arm] for arm in arms])
        faults = SHARED if arm.startswith("shared") else ALONE
        (fault,) = rng.choices(list(faults), list(faults.values()))
        return cls(
            seed, number, arm, fault, rng.randrange(1, 12 * num_actions), rng.randrange(1, 2 * num_actions),
            rng.uniform(0.0, 1.2), rng.uniform(0.2, 8.0), num_actions, rng.choice((2, 16, 128)),
            rng.choice(("8MiB", "32MiB")), rng.choice(("", "", "verify", "compact")), rng.choice(("end", "kill")),
            rng.random() < 0.3,
        )  # fmt: skip


@dataclass
class Arm:
    """Stores that rounds use one after the other, and what their clients know."""

    name: str
    folder: Path
    talks: list[Talk] = field(default_factory=list)
    redis: list[RedisNode] = field(default_factory=list)  # of sessions, and of KV
    compact_s: float = 2.0
    start_s: float = 10.0
    _reference: Reference | None = None
    _model: str | None = None

    @property
    def window(self) -> int:
        return SHORT_WINDOW if self.name == "short" else WINDOW

    def nodes(self, disk: str) -> list[Node]:
        self.folder.mkdir(exist_ok=True)
        self._model = save_model({"short": "plain", "shared": "plain"}.get(self.name, self.name.split()[-1]),
                                 self.folder / "model")  # fmt: skip
        flags = ["--hbm", "4MiB", "--cpu", "4MiB", "--disk", disk, "--max-model-len", str(self.window)]
        if not self.name.startswith("shared"):
            return [Node(self.folder / "store", self._model, flags)]
        if not self.redis:
            self.redis = [RedisNode(self.folder / "sessions", *DURABLE), RedisNode(self.folder / "kv")]
        flags += ["--session-store", self.redis[0].url, "--remote", self.redis[1].url]
        return [Node(self.folder / name, self._model, flags) for name in ("one", "other")]

    @property
    def reference(self) -> Reference:
        if self._reference is None:
            self._reference = Reference(self._model, self.window)
        return self._reference

    def close(self) -> None:
        for redis in self.redis:
            redis.kill()
        if self._reference is not None:
            self._reference.close()


class Round:
    """Plays a script on an arm. attempt: 1, or more if the round began before. counts: what came of it."""

    def __init__(self, script: Script, arm: Arm, attempt: int) -> None:
        self.script, self.arm, self.counts = script, arm, Counter[str](rounds=1)
        self._rng = random.Random(f"{script.seed}:{script.number}:faults")
        self._nodes = arm.nodes(script.disk)
        for node in self._nodes:
            node.start_s = arm.start_s
        self._victim = self._rng.choice(self._nodes)
        self._progress = Progress()
        self._is_again = attempt > 1
        self._clients = [self._client(i, f"-{attempt}" if attempt > 1 else "") for i in range(NUM_CLIENTS)]
        self._flips: dict[Node, int] = {}

    def _client(self, index: int, again: str) -> Client:
        seed, number = self.script.seed, self.script.number
        return Client(
            f"{seed}-{number}{again}-{index}", f"{seed}:{number}:{index}", self._nodes,
            self.arm.talks[index::NUM_CLIENTS], self._progress, self.arm.name == "short",
        )  # fmt: skip

    def play(self) -> None:
        """Raises Failure, after all servers have told where they are."""
        try:
            self._before()
            self._start()
            self._check(self._is_again)
            self._talk()
            self._heal()
            self._settle()
            self._check()
            self._live()
            self._end()
            self._offline()
            self._compare()
        except BaseException:
            for node in self._nodes:
                node.show_stacks()
            raise
        self.arm.start_s = max(node.start_s for node in self._nodes)
        self.counts.update(self._progress.counts)

    @property
    def _talks(self) -> list[Talk]:
        return [talk for client in self._clients for talk in client.talks]

    # -- before anybody talks ----------------------------------------------------------------------------------------
    def _before(self) -> None:
        script, victim = self.script, self._victim
        if script.fault == "flipped bytes" and (victim.store / "blocks" / "data.mdb").exists():
            self._flips[victim] = flip(victim.store, self._rng, script.flips)
            self.counts["flips"] += self._flips[victim]
        elif script.fault == "kill at the start":
            victim.launch()
            time.sleep(script.part * victim.start_s)
            victim.kill()
            self.counts["kills"] += 1

    def _start(self) -> None:
        """All at once, as starting is mostly one thread's work."""
        down = [node for node in self._nodes if not node.is_running]
        with ThreadPoolExecutor(len(self._nodes)) as threads:
            list(threads.map(Node.start, down))
        self.counts["starts"] += len(down)
        for node in self._nodes:
            wait_until(lambda node=node: node.get("/health")["status"] == "ok", f"{node.store.name} is well")  # type: ignore[misc]

    def _check(self, is_again: bool = False) -> None:
        for node in self._nodes:
            for client in self._clients:
                client.talks = [talk for talk in client.talks if check_transcript(node, talk, is_again) or not is_again]
            for client in self._clients:
                for name in client.deleted:
                    expect(node.ask("GET", f"/sessions/{name}")[0] == 404, f"{name} was deleted, and is there again")
        self.counts["transcripts"] += len(self._nodes) * len(self._talks)

    # -- while all talk ----------------------------------------------------------------------------------------------
    def _talk(self) -> None:
        script, progress = self.script, self._progress
        with ThreadPoolExecutor(NUM_CLIENTS) as threads:
            talking = [threads.submit(client.act, script.num_actions) for client in self._clients]
            try:
                is_after_turn = script.fault == "kill after a turn"
                pieces, turns = (0, script.turns) if is_after_turn else (script.pieces, 0)
                progress.wait(pieces, turns, lambda: any(one.done() and one.exception() for one in talking) or all(
                    one.done() for one in talking))  # fmt: skip
                progress.may_fail = script.fault not in ("calm", "flipped bytes", "kill at the start", "kill compact")
                self._befall(talking)
                _join(talking)
            except BaseException:
                for node in self._nodes:  # else the clients would wait for them
                    node.show_stacks()
                raise

    def _befall(self, talking: Sequence[Future[None]]) -> None:
        fault, victim = self.script.fault, self._victim
        if fault in ("kill", "kill after a turn"):
            victim.kill()
            self.counts["kills"] += 1
        elif fault == "end":
            victim.end()
        elif fault == "kill the engine":
            self._kill_engine()
        elif fault in ("stop the engine", "stop the server"):
            processes = victim.cores if fault == "stop the engine" else [victim.process]
            for process in processes:
                self._stop(process)
        elif fault == "disk full":
            file = victim.store / self._rng.choice(("blocks", "sessions")) / "data.mdb"
            victim.limit_files(int(self.script.part * file.stat().st_size))
            self._progress.wait(self._progress.num_pieces + self.script.pieces, 0, lambda: all(
                one.done() for one in talking))  # fmt: skip
            victim.limit_files(resource.RLIM_INFINITY)
        elif "Redis" in fault:
            redis = self.arm.redis[fault.startswith("KV")]
            if fault.endswith("stopped"):
                self._stop(psutil.Process(redis.process.pid))
            else:
                redis.kill()
                redis.start()

    def _kill_engine(self) -> None:
        [core] = self._victim.cores
        core.kill()
        self.counts["kills"] += 1
        wait_until(
            lambda: any(one.pid != core.pid for one in self._victim.cores), "the engine's process is started again"
        )

    def _stop(self, process: psutil.Process) -> None:
        process.send_signal(signal.SIGSTOP)
        time.sleep(self.script.pause_s)
        process.send_signal(signal.SIGCONT)

    # -- afterwards --------------------------------------------------------------------------------------------------
    def _heal(self) -> None:
        """Servers that were killed are there again, and all is well."""
        self._start()
        self._progress.may_fail = "Redis" in self.script.fault  # a server may learn of its return when it asks

    def _settle(self) -> None:
        for client in self._clients:
            for talk in client.talks:
                client.settle(talk)

    def _live(self) -> None:
        """A server's own look at its store, and what it has refused."""
        for node in self._nodes:
            if self.script.live:
                code, found = run_command(self.script.live, "--store", str(node.store))
                if self.script.live == "verify":
                    self._sound(node, code, found)
            failures = node.get("/admin/stats")["store"]["read_failures"]
            self.counts["refused blocks"] += failures.get("corrupt", 0)

    def _end(self) -> None:
        for node in self._nodes:
            node.end() if self.script.ending == "end" else node.kill()
        self.counts["kills"] += len(self._nodes) * (self.script.ending == "kill")

    def _offline(self) -> None:
        for node in self._nodes:
            node.wait_until_released()
            place = ("--store", str(node.store))
            if self.script.fault == "kill compact":
                with start_command("compact", *place) as process:
                    time.sleep(self.script.part * self.arm.compact_s)
                    process.kill()
                node.wait_until_released()
                self.counts["kills"] += 1
            elif self.script.compacts:
                began_s = time.monotonic()
                run_command("compact", *place)
                self.arm.compact_s = time.monotonic() - began_s
            self._sound(node, *run_command("verify", *place, *(["--delete"] if node in self._flips else [])))
            if node in self._flips:
                del self._flips[node]
                self._sound(node, *run_command("verify", *place))

    def _sound(self, node: Node, code: int, found: dict) -> None:
        """`verify` finds at most what was flipped."""
        problems = found.get("sessions", {}).get("problems")
        wrong = f"verify of {node.store} with {self._flips.get(node, 0)} flips: exit code {code}, {found}"
        expect(found["num_corrupt"] <= self._flips.get(node, 0) and not problems and not found.get("set_aside"), wrong)
        expect(code == 0 or found["num_corrupt"], wrong)
        self.counts["found by verify"] += found["num_corrupt"]

    def _compare(self) -> None:
        gone = [talk for client in self._clients for talk in client.gone]
        for talk in (*gone, *self._talks):
            try:
                num_same, num_ties = self.arm.reference.check(talk)
            except AssertionError as error:
                raise Failure(str(error)) from error
            self.counts.update({"compared": num_same, "ties": num_ties})
        for talk in gone:
            self.arm.reference.forget(talk.name)
        self.arm.talks = self._talks


def _join(talking: Sequence[Future[None]]) -> None:
    """Raises what the first of the clients raises that fails."""
    for one in wait(talking, return_when=FIRST_EXCEPTION).done:
        one.result()
