"""Flags of `kvstore chat` beside those of the engine."""

from dataclasses import dataclass

from kvstore.config import SESSION_ID, TEXT, ValueForm, matching, one_of, setting, whole
from kvstore.service.settings.options import LIFETIME, TTL

TEMPERATURE = ValueForm(parse=float, accepts="a number from 0 to 100", low=0, high=100)
ID = ValueForm("ID", matching(SESSION_ID), "1 to 128 letters, digits, '-' or '_'")


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """The flags of `kvstore chat` about the conversation; the engine's own options travel apart."""

    temperature: float = setting(0.0, TEMPERATURE, "0 is greedy")
    max_tokens: int | None = setting(
        None, whole(1, 2**31), "tokens of one answer at most", shown="what remains of the window"
    )
    system: str | None = setting(None, TEXT, "system prompt")
    session: str = setting("terminal", ID, "id of the conversation")
    truncation: str = setting("auto", one_of("auto", "disabled"), "auto drops the oldest turns when the window is full")
    truncation_reuse: str = setting(
        "reencode",
        one_of("reencode", "exact"),
        "after a truncation, reencode keeps the KV of what stays, exact computes it again",
    )
    ttl_s: float | None = setting(None, LIFETIME, TTL, shown="none")
