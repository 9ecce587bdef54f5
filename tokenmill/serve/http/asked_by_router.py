"""What a router asks for instead of an answer: the identities of a prompt, or that it is read for another server."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

from tokenmill.params import SamplingParams
from tokenmill.processor import Prompt
from tokenmill.serve.errors import HttpError
from tokenmill.serve.http.routed import Probed, Prompted

if TYPE_CHECKING:
    from tokenmill.serve.http.request_context import RequestContext, RequestOptions


async def answer_router(context: RequestContext, prompt: Prompt, options: RequestOptions) -> None:
    """Raises Probed where that is all that is wanted."""
    if context.route is None or not (context.route.probe or context.route.prefill):
        return
    context.service.check_open()
    block_size = context.service.facts.block_size
    if context.route.probe:
        salt = context.tenant.salt(options.cache_salt)
        tokens, chain = await context.service.prompts.identities(prompt, salt, context.adapter)
        raise Probed(Prompted(tokens, block_size, base64.b64encode(b"".join(chain)).decode()))
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False)
    _, output = await context.complete(prompt, params, "prefill", context.scheduling(options), pushes=True)
    if output.error is not None:
        raise HttpError(503, output.error, "unavailable")
    raise Probed(Prompted(len(output.prompt_token_ids), block_size, ""))  # the other server has its blocks now
