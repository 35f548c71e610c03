"""Token counts and times as clients see them: OpenAI's names, with the tier that each cached token came from."""

import msgspec

from kvstore.engine.outputs import CachedTokensDetails, Timings, Usage


class CachedTokens(msgspec.Struct):
    """By the tier that held a block when the request arrived; reencoded: reused at another position."""

    hbm: int
    cpu: int
    disk: int
    remote: int
    reencoded: int


class PromptTokensDetails(msgspec.Struct):
    """cached_tokens: a subset of prompt_tokens, and the sum of its details."""

    cached_tokens: int
    cached_tokens_details: CachedTokens


class UsageObject(msgspec.Struct, omit_defaults=True):
    """capped_max_tokens: only where the request's max_tokens was more than the window had left, which is this; of
    several prompts that of the longest.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    capped_max_tokens: int | None = None


class TimingsObject(msgspec.Struct):
    """Seconds; null for what was not reached."""

    queue_s: float | None
    load_s: float | None
    prefill_s: float | None
    ttft_s: float | None
    decode_s: float | None


def usage_object(usage: Usage) -> UsageObject:
    return sum_usage([usage])


def sum_usage(usages: list[Usage]) -> UsageObject:
    details = sum((usage.cached_tokens_details for usage in usages), CachedTokensDetails())
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    by_tier = CachedTokens(details.hbm, details.cpu, details.disk, details.remote, details.reencoded)
    capped = min((usage.capped_max_tokens for usage in usages if usage.capped_max_tokens is not None), default=None)
    return UsageObject(prompt, completion, prompt + completion, PromptTokensDetails(details.total, by_tier), capped)


def timings_object(timings: Timings) -> TimingsObject:
    return TimingsObject(timings.queue_s, timings.load_s, timings.prefill_s, timings.ttft_s, timings.decode_s)
