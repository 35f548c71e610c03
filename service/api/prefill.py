"""POST /prefill: a prompt of another server, computed and stored in the tier that both share.

Only a server with `--role prefill` has it. Needs a key that the fleet's secret makes.
"""

from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import Meta

from kvstore.blocks.ids import Lineage
from kvstore.engine.client.messages import Flush
from kvstore.engine.client.requests import Handle
from kvstore.engine.sampling_params import SamplingParams
from kvstore.engine.turns import Turn
from kvstore.remote.prefill import PATH
from kvstore.service.api.exchange import EXCHANGE, context_of
from kvstore.service.api.openai.stateless import output_of
from kvstore.service.api.schema import TokenId, read_body
from kvstore.service.http.errors import NO_RETRY, ApiError, Route, json_response

SHARE_S = 60.0  # for what was computed to be stored
PARAMS = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
Hex = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class PrefillBody(msgspec.Struct, kw_only=True):
    """token_ids: what makes no whole block is not stored; none asks whether this server takes prompts of that model.
    root: of their chain.

    fingerprint: of the model. tenant: whose share of this server it takes. turn_starts: where in the prompt each turn
    begins, as far as known.
    """

    token_ids: Annotated[list[TokenId], Meta(max_length=2**20)]
    root: Hex
    fingerprint: Hex
    tenant: Annotated[str, Meta(max_length=64)] = ""
    turn_starts: Annotated[list[TokenId], Meta(max_length=2**20)] = []


class PrefillAnswer(msgspec.Struct):
    """num_blocks: of the prompt, from its beginning, that are in the shared tier now."""

    num_blocks: int


async def prefill(request: web.Request) -> web.Response:
    context, body = context_of(request), await read_body(request, PrefillBody)
    engine = context.engine
    if body.fingerprint != engine.engine.facts.fingerprint.hex():
        message = f"this server has {context.model_name!r}, and the prompt is of other weights, or of other blocks"
        raise ApiError(409, message, param="fingerprint", code="another_model", headers=NO_RETRY)
    if not body.token_ids:
        return json_response(PrefillAnswer(0))

    async def computed(turn: Turn[Handle]) -> Handle:
        handle = await engine.submit(
            turn, body.token_ids, PARAMS, body.tenant, spliced=((), Lineage(bytes.fromhex(body.root))),
            turn_starts=body.turn_starts,
        )  # fmt: skip
        await output_of(turn, handle)
        return handle

    with context.limits.admit(body.tenant):
        async with context.reading(computed, request[EXCHANGE]) as (turn,):
            chain = (await turn.result()).chain
        num_blocks = await engine.call(engine.engine.client.call, Flush(chain, SHARE_S)) if chain else 0
    return json_response(PrefillAnswer(num_blocks))


ROUTES = (
    Route("POST", PATH, prefill, "fleet", "Compute a prompt for another server.", PrefillBody, PrefillAnswer, "server"),
)
