"""What concerns all replicas is asked of each, and told in one answer: health, metrics, the administrator's routes."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvstore.service.http.errors import unavailable
from kvstore.service.replicas.replica import Head, Whole, refusal

Answer = tuple[Head, bytes]
_HEALTH = ("/health", "/healthz", "/livez", "/ping")
_STATES = (*_HEALTH, "/ready")  # a 503 of these has the body of a 200
_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?( .*)")


def concerns_everyone(path: str) -> bool:
    return path in _JOINED or path.startswith("/admin/")


def joined(path: str, answers: Sequence[Whole]) -> Answer:
    """One answer of all. What is no 200 of some replica is the answer, but for a 503 of `_STATES`."""
    if not answers:
        return refusal(unavailable("no replica is ready", "starting"))
    answers = sorted(answers, key=lambda one: one.name)
    told = (200, 503) if path in _STATES else (200,)
    other = next((one for one in answers if one.head.status not in told), None)
    return _JOINED.get(path, _by_name)(answers) if other is None else (other.head, other.body)


def _health(answers: Sequence[Whole]) -> Answer:
    """ok where all are, failed where none answers; reasons are those of any."""
    told = {one.name: msgspec.json.decode(one.body) for one in answers}
    states = {one["status"] for one in told.values()}
    is_up = any(one.head.status == 200 for one in answers)
    status = states.pop() if len(states) == 1 else "degraded" if is_up else "failed"
    reasons = sorted({reason for one in told.values() for reason in one["reasons"]})
    return _json(answers[0], 200 if is_up else 503, {"status": status, "reasons": reasons, "replicas": told})


def _ready(answers: Sequence[Whole]) -> Answer:
    is_ready = any(one.head.status == 200 for one in answers)
    return _json(answers[0], 200 if is_ready else 503, {"ready": is_ready})


def _metrics(answers: Sequence[Whole]) -> Answer:
    """Every sample with a label that names its replica, those of a metric below one another."""
    families: dict[str, list[str]] = {}
    for one in answers:
        family = ""
        for line in one.body.decode().splitlines():
            if line.startswith("#"):
                family = " ".join(line.split(" ", 3)[:3])
                families.setdefault(family, [line])
            elif (sample := _SAMPLE.fullmatch(line)) is not None:
                labels = ",".join(filter(None, (f'replica="{one.name}"', sample[2])))
                families[family].append(f"{sample[1]}{{{labels}}}{sample[3]}")
    lines = [line for family in families.values() for line in family]
    return answers[0].head, ("\n".join(lines) + "\n").encode()


def _by_name(answers: Sequence[Whole]) -> Answer:
    told = {one.name: msgspec.json.decode(one.body) for one in answers}
    return _json(answers[0], 200, {"replicas": told})


def _json(like: Whole, status: int, body: Any) -> Answer:
    return Head(status, like.head.headers), msgspec.json.encode(body)


_JOINED: dict[str, Callable[[Sequence[Whole]], Answer]] = {
    **dict.fromkeys(_HEALTH, _health), "/ready": _ready, "/metrics": _metrics,
}  # fmt: skip
