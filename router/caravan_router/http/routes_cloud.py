"""The one route that SageMaker knows, and the one that Vertex AI does."""

import time
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from caravan_router.http import routes_generate, routes_openai
from caravan_router.http.admission import admitted, validating
from caravan_router.http.body import read_body
from caravan_router.http.candidates import best_first
from caravan_router.http.runs import collect, started
from caravan_router.http.schema_cloud import VertexRequest, VertexResponse
from caravan_router.http.serving import serving_of
from caravan_router.http.state import CLIENT, STATE
from caravan_router.http.validation_errors import BodyMismatchError, EmptyPromptError, TooManyPromptsError
from caravan_router.http.validation_tgi import candidates_of, validate_generate


class _Keys(msgspec.Struct, frozen=True):
    """Which of the fields that tell the kinds of request apart are there."""

    inputs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_KEYS = msgspec.json.Decoder(_Keys)
_VERTEX = msgspec.json.Decoder(VertexRequest)

# In TGI's order: the first whose field is there.
_HANDLERS: tuple[tuple[str, Callable[[web.Request], Awaitable[web.StreamResponse]]], ...] = (
    ("inputs", routes_generate.generate_compat),
    ("prompt", routes_openai.completions),
)


async def invocations(request: web.Request) -> web.StreamResponse:
    """SageMaker's: as ``POST /`` with ``inputs``, as ``/v1/completions`` with ``prompt``. Errors are TGI's."""
    keys = await read_body(request, _KEYS)
    for field, handler in _HANDLERS:
        if getattr(keys, field) is not msgspec.UNSET:
            # It reads the body again, which the request has kept.
            return await handler(request)
    raise BodyMismatchError("", f"one of {', '.join(f'`{field}`' for field, _ in _HANDLERS)} is needed")


async def vertex(request: web.Request) -> web.Response:
    """Vertex AI's: a text for each instance. All are generated at once."""
    arrived = time.monotonic()
    state, client = request.app[STATE], request[CLIENT]
    body = await read_body(request, _VERTEX)
    if not body.instances:
        raise EmptyPromptError("instances")
    if len(body.instances) > state.limits.max_client_batch_size:
        raise TooManyPromptsError("instances", state.limits.max_client_batch_size, len(body.instances))
    generations = sum(candidates_of(instance.parameters, state.limits) for instance in body.instances)
    with admitted(state, client, generations):
        with validating(state.metrics, generations):
            valid = [
                await validate_generate(
                    state.engine,
                    state.limits,
                    instance,
                    serving_of(instance, request.headers, client.key, state.limits),
                    stream=False,
                )
                for instance in body.instances
            ]
        with started(state, valid, arrived) as runs:
            collected = iter(await collect(runs))
    texts = []
    for instance, one in zip(body.instances, valid, strict=True):
        candidates = [next(collected) for _ in one.specs]
        best = best_first(candidates)[0] if len(candidates) > 1 else 0
        texts.append(routes_generate.text_of(instance, candidates[best]))
    return web.Response(body=msgspec.json.encode(VertexResponse(texts)), content_type="application/json")
