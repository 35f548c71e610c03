"""`kvstore doctor`: two turns, a restart, a third turn: what came back, from where, and else why nothing did.

A client of the OpenAI API, of our own server, vLLM or SGLang. Knows no engine and no store.
"""

import http.client
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from kvstore.config import DURATION, TEXT, checked, whole
from kvstore.engine.outputs import MISSES
from kvstore.errors import ConfigError, KVStoreError
from kvstore.service.settings.config_file import Told
from kvstore.service.settings.options import JSON, Command, Option

ANSWER_TOKENS, ANSWER_S = 32, 600.0
SETTLE_S = 3.0  # what was computed is on disk within two seconds
PROBE_S, PROBE_EVERY_S = 2.0, 0.1
WORDS = "river stone lamp green seven north window paper iron cloud salt bridge orange quiet wheel garden".split()
FIRST_CHARS, LAST_CHARS = 400, 60
UNTOLD = "start vLLM with --enable-prompt-tokens-details, SGLang with --enable-cache-report"
NO_TIER = "vLLM runs without kvstore's tier: kvstore vllm-config writes the flags"
VLLM_SOURCES = {"local_cache_hit": "hbm", "external_kv_transfer": "tiers below"}
SGLANG_SOURCES = {"device": "hbm", "host": "cpu", "storage": "disk"}


def _address(text: str) -> None:
    try:
        parts = urlsplit(text)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, or half of a pair of brackets
        is_good = False
    if not is_good:
        raise ConfigError("", repr(text), "give an address such as http://127.0.0.1:8000")


COMMAND = Command(
    "doctor",
    {
        "the server": (
            Option("--url", checked(_address), "http://127.0.0.1:8000", "where it listens"),
            Option("--api-key", TEXT, None, "key that its requests must bring", secret=True),
            Option("--model", TEXT, None, "the model's name there", shown="the first that it names"),
        ),
        "the check": (
            Option("--tokens", whole(64), 4000, "length of the conversation; at most half of the model's window"),
            Option("--restart-command", TEXT, None, "what restarts the server, for a shell; else it is for you to do"),
            Option("--wait", DURATION, 1800.0, "how long for the server to go away and come back", shown="30m"),
            JSON,
        ),
    },
    "Exit code 1 when nothing came back; the line on stderr says why.\n\nexamples:\n  kvstore doctor\n"
    "  kvstore doctor --url http://127.0.0.1:30000 --restart-command 'systemctl restart sglang'",
)


@dataclass(frozen=True, slots=True)
class Measured:
    """What the server says of a turn's prompt. cached_tokens: None if it does not say; by_tier: as far as it says; why:
    its words for what it computed again.
    """

    prompt_tokens: int
    cached_tokens: int | None
    by_tier: Mapping[str, int]
    why: str = ""

    @property
    def share(self) -> float:
        return (self.cached_tokens or 0) / max(self.prompt_tokens, 1)


@dataclass
class Talk:
    """A conversation with a server. host: "kvstore", "vllm", "sglang" or another's name; window: in tokens."""

    url: str
    api_key: str | None
    model: str | None
    host: str = ""
    window: int = 8192
    said: list[dict[str, str]] = field(default_factory=list)
    has_chat: bool = True

    def meet(self) -> None:
        """Ask which models it serves."""
        known = {one["id"]: one for one in self._json("/v1/models")["data"]}
        if not known:
            raise KVStoreError(f"{self.url} names no model")
        self.model = self.model or next(iter(known))
        found = known.get(self.model)
        if found is None:
            raise ConfigError(f"--model is {self.model!r}, which is not served there; it serves {', '.join(known)}")
        self.host = str(found.get("owned_by", ""))
        self.window = found.get("max_model_len") or self.window

    def turn(self, text: str) -> Measured:
        """Say it, and keep the answer. A model without a template for chats goes on with one text."""
        before = self.metrics()
        self.said.append({"role": "user", "content": text})
        try:
            reply = self._ask()
        except HTTPError as error:
            if error.code not in (400, 404) or len(self.said) > 1:
                raise
            self.has_chat = False
            reply = self._ask()
        choice = reply["choices"][0]
        answer = choice["message"].get("content") if self.has_chat else choice["text"]
        self.said.append({"role": "assistant", "content": answer or ""})
        return self._measured(reply, before)

    def _ask(self) -> dict[str, Any]:
        body: dict[str, Any] = {"messages": self.said} if self.has_chat else {"prompt": self._text()}
        body |= {"model": self.model, "max_tokens": min(ANSWER_TOKENS, self.window // 16), "temperature": 0}
        if self.host == "sglang":
            body["return_cached_tokens_details"] = True
        return self._json("/v1/chat/completions" if self.has_chat else "/v1/completions", body)

    def _text(self) -> str:
        return "".join(one["content"] for one in self.said)

    def _measured(self, reply: Mapping[str, Any], before: Mapping[str, float]) -> Measured:
        usage = reply["usage"]
        details = usage.get("prompt_tokens_details") or {}
        cached, tiers, miss = details.get("cached_tokens"), details.get("cached_tokens_details"), details.get("miss")
        if self.host == "sglang":
            told = (reply.get("sglext") or {}).get("cached_tokens_details") or {}
            tiers = {tier: told[name] for name, tier in SGLANG_SOURCES.items() if told.get(name) is not None}
        if self.host == "vllm":
            since = {name: value - before.get(name, 0) for name, value in self.metrics().items()}
            by = {tier: since.get(f"vllm:prompt_tokens_by_source_total {name}") for name, tier in VLLM_SOURCES.items()}
            tiers = {tier: int(number) for tier, number in by.items() if number is not None}
        if cached is None and tiers:
            cached = sum(tiers.values())
        why = "" if miss is None else MISSES[miss["cause"]] + (f" ({miss['why']})" if "why" in miss else "")
        return Measured(usage["prompt_tokens"], cached, {name: n for name, n in (tiers or {}).items() if n}, why)

    def metrics(self) -> dict[str, float]:
        """Of its /metrics, by name, with the label `tier` or `source` behind it; none where there are none."""
        try:
            lines = self._send("/metrics").decode().splitlines()
        except HTTPError:
            return {}
        found: dict[str, float] = {}
        for line in lines:
            if read := re.fullmatch(r"([a-z_:]+)(?:\{(.*)\})? ([0-9.eE+-]+)", line):
                label = re.search(r'\b(?:tier|source)="([^"]*)"', read[2] or "")
                name = f"{read[1]} {label[1]}" if label else read[1]
                found[name] = found.get(name, 0) + float(read[3])
        return found

    def is_up(self) -> bool:
        try:
            self._send("/health", timeout_s=PROBE_S)
        except (OSError, http.client.HTTPException):
            return False
        return True

    def _json(self, path: str, body: object = None) -> dict[str, Any]:
        return dict(json.loads(self._send(path, body)))

    def _send(self, path: str, body: object = None, timeout_s: float = ANSWER_S) -> bytes:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        data = None if body is None else json.dumps(body).encode()
        with urlopen(Request(self.url.rstrip("/") + path, data, headers), timeout=timeout_s) as reply:
            return bytes(reply.read())


def run(given: Told) -> int:
    """Returns 0 when something came back. Raises KVStoreError with the cause otherwise."""
    values = given.values
    talk = Talk(values["url"], values["api_key"], values["model"])

    def told(line: str) -> None:
        print(line, file=sys.stderr if values["json"] else sys.stdout, flush=True)

    try:
        talk.meet()
        second, third = _three_turns(talk, values, told)
    except HTTPError as error:
        raise KVStoreError(f"{talk.url} answers {error.code}: {_words(error)}") from None
    except KVStoreError:
        raise
    except (URLError, OSError, http.client.HTTPException) as error:
        raise KVStoreError(f"{talk.url} does not answer: {getattr(error, 'reason', error)}") from None
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise KVStoreError(f"{talk.url} does not speak the OpenAI API: {error!r}") from None
    cause = None if third.cached_tokens else _cause(talk, second, third)
    if values["json"]:
        print(json.dumps({"host": talk.host, **asdict(third), "share": third.share, "cause": cause}))
    if cause is not None:
        raise KVStoreError(cause)
    return 0


def _three_turns(talk: Talk, values: Mapping[str, Any], told: Callable[[str], None]) -> tuple[Measured, Measured]:
    """The second turn, and the third, after the restart. told: what shows a line to the person."""
    first = talk.turn(_text_of(min(FIRST_CHARS, talk.window // 4)))
    told(f"turn 1: {first.prompt_tokens:,} prompt tokens, to {talk.model} of {talk.host}")
    rest = min(values["tokens"], talk.window // 2) - first.prompt_tokens
    per_token = len(talk.said[0]["content"]) / max(first.prompt_tokens, 1)
    second = talk.turn(_text_of(max(int(rest * per_token), LAST_CHARS)))
    told(f"turn 2: {_found(second)}")
    _await_restart(talk, values["restart_command"], values["wait"], told)
    third = talk.turn(_text_of(min(LAST_CHARS, talk.window // 16)))
    told(f"turn 3, after the restart: {_found(third)}")
    return second, third


def _found(turn: Measured) -> str:
    if turn.cached_tokens is None:
        return f"{turn.prompt_tokens:,} prompt tokens; how many of them were cached is not told"
    tiers = "".join(f", {name} {number:,}" for name, number in turn.by_tier.items())
    return f"{turn.prompt_tokens:,} prompt tokens, {turn.cached_tokens:,} of them cached ({turn.share:.1%}{tiers})"


def _await_restart(talk: Talk, command: str | None, wait_s: float, told: Callable[[str], None]) -> None:
    """Until the server went away and came back. The command may be the new server itself, and never end."""
    process = None
    if command is None:
        told("restart the server now, by kill -9 if you like; this waits until it went away and came back")
    else:
        time.sleep(SETTLE_S)
        told(f"restarting: {command}")
        process = subprocess.Popen(command, shell=True, stdin=subprocess.DEVNULL, stdout=2)
    deadline, was_away = time.monotonic() + wait_s, False
    while not (is_up := talk.is_up()) or not was_away:
        was_away |= not is_up
        if process is not None and process.poll():
            raise KVStoreError(f"--restart-command ended with {process.returncode}")
        if time.monotonic() > deadline:
            did = "has not come back" if was_away else "has not gone away"
            raise KVStoreError(f"the server {did} within {wait_s:g} s; --wait is how long this waits")
        time.sleep(PROBE_EVERY_S)


def _cause(talk: Talk, second: Measured, third: Measured) -> str:
    """Why nothing came back, as far as the server and its metrics tell."""
    if third.cached_tokens is None:
        return f"what came back is not known, as {talk.url} does not tell: {UNTOLD}"
    cause = third.why or f"{talk.host or 'the host'} handed over nothing"
    metrics = talk.metrics()
    if talk.host == "kvstore" and not third.why:
        tiers = [name.split()[1] for name in metrics if name.startswith("kvstore:tier_limit_bytes ")]
        keeps = f"the server keeps KV in {' and '.join(tiers)} alone; its first lines say which tiers it has"
        cause = "the server's store does not know the conversation" if "disk" in tiers else keeps
    if talk.host == "vllm":
        chunks = metrics.get("vllm:kvstore_disk_blocks")
        took = f"the tier has {chunks:,.0f} chunks; vLLM took none of them" if chunks else cause
        cause = NO_TIER if chunks is None else took
    if not second.cached_tokens:
        cause += "; nor did turn 2 find anything of turn 1, before the restart"
    return f"nothing of {third.prompt_tokens:,} prompt tokens came back: {cause}"


def _text_of(num_chars: int) -> str:
    """Words that nobody has said before."""
    words = random.SystemRandom().choices(WORDS, k=num_chars // 4)
    return " ".join(words)[:num_chars] + ". "


def _words(error: HTTPError) -> str:
    """What an error's body says, in one line."""
    text = error.read().decode(errors="replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return " ".join(text.split())[:200]
