"""Cache breakpoints: for how long a request wants its conversation kept. Knows no route."""

from collections.abc import Iterable, Mapping

import msgspec

from kvstore.service.http.errors import bad_request

TTLS: Mapping[str, float] = {"5m": 300.0, "30m": 1800.0, "1h": 3600.0, "12h": 43200.0}
DEFAULT_TTL = "30m"  # OpenAI's


class Breakpoint(msgspec.Struct):
    """Of a content block, or of the whole request (`prompt_cache_options`), whose ttl the others have that say none.

    mode: "implicit", so that the prompt's end is a breakpoint, or "explicit"; of a request alone. ttl: of TTLS.
    """

    mode: str | None = None
    ttl: str | None = None


def seconds_of(ttl: str, param: str) -> float:
    """Raises ApiError 400 for a text that is none of TTLS."""
    if ttl not in TTLS:
        raise bad_request(param, f"{param} is {ttl[:40]!r}; give {', '.join(TTLS)}")
    return TTLS[ttl]


def pin_s_of(options: Breakpoint | None, breakpoints: Iterable[Breakpoint]) -> float | None:
    """For how many seconds the conversation is pinned: the longest of its breakpoints; None where there is none.

    Raises ApiError 400.
    """
    options = options or Breakpoint()
    if options.mode not in (None, "implicit", "explicit"):
        shown = options.mode[:40]
        raise bad_request("prompt_cache_options.mode", f"the mode {shown!r} is not known; give implicit or explicit")
    default_s = seconds_of(options.ttl or DEFAULT_TTL, "prompt_cache_options.ttl")
    wanted = [default_s] if options.ttl is not None and options.mode != "explicit" else []
    wanted += [
        default_s if one.ttl is None else seconds_of(one.ttl, "prompt_cache_breakpoint.ttl") for one in breakpoints
    ]
    return max(wanted, default=None)
