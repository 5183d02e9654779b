"""What operators and tools ask: health, metrics, the model, tokens, the API's description."""

import asyncio
from functools import cache
from importlib import resources

import msgspec
from aiohttp import web

from caravan_router.core.engine import TokenizedText
from caravan_router.http.generation.bounds import bounds_of, model_of
from caravan_router.http.generation.permits import check_rate
from caravan_router.http.generation.rules import EmptyPromptError, TooManyBytesError
from caravan_router.http.openai.schema import Model, ModelList
from caravan_router.http.ops.docs_page import render_page
from caravan_router.http.server.body import read_body
from caravan_router.http.server.errors import UnhealthyError
from caravan_router.http.server.state import CLIENT, STATE
from caravan_router.http.tgi.schema import Info, TokenizedToken, TokenizeRequest
from caravan_router.metrics.recorder import CONTENT_TYPE
from caravan_router.text.prompt_text import token_spans

_TOKENIZE = msgspec.json.Decoder(TokenizeRequest)


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


async def health(request: web.Request) -> web.Response:
    """200 and nothing while a shard is up and makes progress. Asks no shard: a long prefill does not delay it."""
    if not request.app[STATE].engine.healthy:
        raise UnhealthyError
    return web.Response()


async def info(request: web.Request) -> web.Response:
    """TGI's fields and some of ours."""
    state = request.app[STATE]
    model = model_of(state.engine)
    bounds = bounds_of(state.limits, model)
    return _json(
        Info(
            model_id=model.name,
            model_sha=model.fingerprint,
            model_pipeline_tag="text-generation",
            max_concurrent_requests=state.limits.max_concurrent_requests,
            max_best_of=state.limits.max_best_of,
            max_stop_sequences=state.limits.max_stop_sequences,
            max_input_tokens=bounds.max_input_tokens,
            max_total_tokens=bounds.max_total_tokens,
            validation_workers=1,
            max_client_batch_size=state.limits.max_client_batch_size,
            router="text-generation-router",
            version=state.info.version,
            sha=None,
            docker_label=None,
            server="caravan-router",
            waiting_served_ratio=state.info.waiting_served_ratio,
            max_waiting_tokens=state.info.max_waiting_tokens,
            max_batch_prefill_tokens=state.info.max_batch_prefill_tokens,
            max_batch_total_tokens=model.total_cells,
            max_batch_size=state.info.max_batch_size,
        )
    )


async def metrics(request: web.Request) -> web.Response:
    """Prometheus text."""
    return web.Response(body=await request.app[STATE].metrics.render(), headers={"Content-Type": CONTENT_TYPE})


async def tokenize(request: web.Request) -> web.Response:
    """The tokens of a text, and where in it they lie."""
    state = request.app[STATE]
    body = await read_body(request, _TOKENIZE)
    check_rate(request[CLIENT])
    limit = bounds_of(state.limits, model_of(state.engine)).max_prompt_bytes
    if not body.inputs:
        raise EmptyPromptError("inputs")
    size = len(body.inputs.encode())
    if size > limit:
        raise TooManyBytesError("inputs", limit, size)
    tokenized = await state.engine.queries.tokenize(body.inputs, add_special=body.add_special_tokens is not False)
    # Long texts take long: streams go on meanwhile.
    reply = await asyncio.to_thread(_tokens_of, body.inputs, tokenized)
    return web.Response(body=reply, content_type="application/json")


def _tokens_of(text: str, tokenized: TokenizedText) -> bytes:
    spans = token_spans(text, tokenized)
    return msgspec.json.encode([TokenizedToken(span.token_id, span.text, span.start, span.stop) for span in spans])


async def models(request: web.Request) -> web.Response:
    """The one model and its adapters, under OpenAI's route."""
    facts = model_of(request.app[STATE].engine)
    adapters = [Model(adapter, "model", 0, facts.name, adapter, facts.name) for adapter in facts.adapters]
    return _json(ModelList("list", [Model(facts.name, "model", 0, facts.name, facts.name, None), *adapters]))


@cache
def openapi_document() -> bytes:
    """The committed document, read once; ``build_app`` does, before there is a loop to block."""
    return resources.files("caravan_router.http").joinpath("openapi.json").read_bytes()


@cache
def docs_page() -> bytes:
    return render_page(msgspec.json.decode(openapi_document())).encode()


async def docs(_request: web.Request) -> web.Response:
    """This API's description, to be read."""
    # Nothing runs and nothing is loaded, whatever a description says.
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return web.Response(
        body=docs_page(), content_type="text/html", charset="utf-8", headers={"Content-Security-Policy": policy}
    )


async def openapi(_request: web.Request) -> web.Response:
    """This API's description."""
    return web.Response(body=openapi_document(), content_type="application/json")
