"""Flags of `kvstore chat` beside those of the engine."""

from dataclasses import dataclass

from kvstore.service.settings.options import choice, count, flag, number, plain_text, session_id, ttl_flag


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """The flags of `kvstore chat` about the conversation; the engine's own options travel apart."""

    temperature: float = flag(0.0, number, "0 is greedy")
    max_tokens: int | None = flag(None, count, "tokens of one answer at most", shown="what remains of the window")
    system: str | None = flag(None, plain_text, "system prompt")
    session: str = flag("terminal", session_id, "id of the conversation")
    truncation: str = flag("auto", choice("auto", "disabled"), "auto drops the oldest turns when the window is full")
    truncation_reuse: str = flag(
        "reencode",
        choice("reencode", "exact"),
        "after a truncation, reencode keeps the KV of what stays, exact computes it again",
    )
    ttl_s: float | None = ttl_flag()
