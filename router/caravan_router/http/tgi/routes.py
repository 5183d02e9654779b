"""TGI's routes: ``/generate``, ``/generate_stream``, and ``/``, which is either."""

import time
from collections.abc import Sequence

import msgspec
from aiohttp import web

from caravan_router.core.errors import EngineError, TextTooLongError
from caravan_router.core.tokens import GeneratedToken
from caravan_router.http.generation.candidates import best_first
from caravan_router.http.generation.headers import compute_headers, timing_headers
from caravan_router.http.generation.permits import admitted, validating
from caravan_router.http.generation.request import ValidRequest
from caravan_router.http.generation.run import Run
from caravan_router.http.generation.runs import collect, started
from caravan_router.http.generation.serving import serving_of
from caravan_router.http.server.body import read_body
from caravan_router.http.server.errors import ValidationError, tgi_body
from caravan_router.http.server.event_stream import EventStream, event
from caravan_router.http.server.state import CLIENT, STATE
from caravan_router.http.tgi.schema import (
    BestOfSequence,
    CompatGenerateRequest,
    Details,
    GenerateRequest,
    GenerateResponse,
    PrefillToken,
    StreamDetails,
    StreamEvent,
    Token,
)
from caravan_router.http.tgi.validation import WITHOUT_PARAMETERS, candidates_of, validate_generate, wants_details
from caravan_router.text.assembler import Piece
from caravan_router.text.detokenize import display_text
from caravan_router.text.prompt_text import PromptText

_GENERATE = msgspec.json.Decoder(GenerateRequest)
_COMPAT = msgspec.json.Decoder(CompatGenerateRequest)
_ENCODER = msgspec.json.Encoder()

Body = GenerateRequest | CompatGenerateRequest


async def generate(request: web.Request) -> web.Response:
    """The whole reply as one object."""
    arrived = time.monotonic()
    body = await read_body(request, _GENERATE)
    reply, headers = await _whole(request, body, arrived)
    return _json(_ENCODER.encode(reply), headers)


async def generate_stream(request: web.Request) -> web.StreamResponse:
    """One event a token."""
    arrived = time.monotonic()
    body = await read_body(request, _GENERATE)
    return await _stream(request, body, arrived)


async def generate_compat(request: web.Request) -> web.StreamResponse:
    """``POST /``: as ``stream`` says; the whole reply is an array of one.

    TGI echoes the prompt here unless told otherwise. This does not: ``return_full_text`` is false by default, as on the
    other routes. TGI's own client always sends the field, and huggingface_hub documents false while not sending it.
    """
    arrived = time.monotonic()
    body = await read_body(request, _COMPAT)
    if body.stream:
        return await _stream(request, body, arrived)
    reply, headers = await _whole(request, body, arrived)
    return _json(_ENCODER.encode([reply]), headers)


def _json(data: bytes, headers: dict[str, str]) -> web.Response:
    return web.Response(body=data, headers=headers, content_type="application/json")


async def _validate(request: web.Request, body: Body, *, stream: bool) -> ValidRequest:
    state = request.app[STATE]
    with validating(state.metrics, candidates_of(body.parameters, state.limits)):
        serving = serving_of(body, request.headers, request[CLIENT].key, state.limits)
        return await validate_generate(state.engine, state.limits, body, serving, stream=stream)


async def _whole(request: web.Request, body: Body, arrived: float) -> tuple[GenerateResponse, dict[str, str]]:
    state = request.app[STATE]
    with admitted(state, request[CLIENT], candidates_of(body.parameters, state.limits)):
        valid = await _validate(request, body, stream=False)
        with started(state, [valid], arrived) as runs:
            collected = await collect(runs)
        best = best_first(collected)[0] if len(runs) > 1 else 0
        headers = timing_headers(state, [valid], runs)
        if not wants_details(body.parameters or WITHOUT_PARAMETERS):
            return GenerateResponse(text_of(body, collected[best])), headers
        return _detailed(body, valid, runs, collected, best), headers


def _detailed(
    body: Body, valid: ValidRequest, runs: list[Run], collected: list[list[Piece]], best: int
) -> GenerateResponse:
    prefill = _prefill(valid.prompt_text, runs[0])
    others = [_sequence(body, run, pieces, prefill) for run, pieces in zip(runs, collected, strict=True)]
    chosen = others.pop(best)
    return GenerateResponse(
        chosen.generated_text,
        Details(
            finish_reason=chosen.finish_reason,
            generated_tokens=chosen.generated_tokens,
            # Of the first: what the others share with it was not there before.
            cached_tokens=runs[0].pieces.cached_tokens,
            seed=chosen.seed,
            prefill=chosen.prefill,
            tokens=chosen.tokens,
            best_of_sequences=others or msgspec.UNSET,
            top_tokens=chosen.top_tokens,
        ),
    )


def text_of(body: Body, pieces: Sequence[Piece]) -> str:
    """With the prompt as the client wrote it before it, if asked for."""
    parameters = body.parameters or WITHOUT_PARAMETERS
    return "".join([body.inputs if parameters.return_full_text else "", *(piece.text for piece in pieces)])


def _prefill(prompt: PromptText | None, run: Run) -> list[PrefillToken]:
    """The prompt's tokens as the model saw them: what ``truncate`` cut off is not among them."""
    if prompt is None:
        return []
    columns = (prompt.tokenized.token_ids, prompt.tokenized.pieces, run.pieces.prompt_logprobs)
    return [
        PrefillToken(token_id, display_text(piece), score.logprob)
        for token_id, piece, score in zip(*columns, strict=True)
    ]


def _sequence(body: Body, run: Run, pieces: list[Piece], prefill: list[PrefillToken]) -> BestOfSequence:
    parameters = body.parameters or WITHOUT_PARAMETERS
    finish = pieces[-1].finish
    assert finish is not None
    return BestOfSequence(
        generated_text=text_of(body, pieces),
        finish_reason=finish.value,
        generated_tokens=run.tokens,
        seed=run.seed,
        prefill=prefill,
        tokens=[_token(piece) for piece in pieces],
        top_tokens=[_top_tokens(piece.token) for piece in pieces] if parameters.top_n_tokens else msgspec.UNSET,
    )


async def _stream(request: web.Request, body: Body, arrived: float) -> web.StreamResponse:
    """Whatever is wrong with the request's content is an error event after status 200, as TGI has it.

    Not so where load balancers must see it: too many requests (429) and no shard (503) found before the stream began.
    """
    state = request.app[STATE]
    headers = compute_headers(state, len(body.inputs))
    with admitted(state, request[CLIENT], candidates_of(body.parameters, state.limits)):
        try:
            valid = await _validate(request, body, stream=True)
        except (ValidationError, TextTooLongError) as error:
            async with EventStream(request, headers, state.limits) as events:
                await events.send(event(tgi_body(error)))
            return events.response
        async with EventStream(request, headers, state.limits) as events:
            try:
                with started(state, [valid], arrived) as [run]:
                    await _send_tokens(events, body, run)
            except EngineError as error:
                await events.send(event(tgi_body(error)))
        return events.response


async def _send_tokens(events: EventStream, body: Body, run: Run) -> None:
    parameters = body.parameters or WITHOUT_PARAMETERS
    top_tokens = bool(parameters.top_n_tokens)
    text = [body.inputs] if parameters.return_full_text else []
    index = 0
    async for pieces in run.pieces:
        lines = []
        for piece in pieces:
            index += 1
            text.append(piece.text)
            message = StreamEvent(
                index, _token(piece), None, None, _top_tokens(piece.token) if top_tokens else msgspec.UNSET
            )
            if piece.finish is not None:
                message.generated_text = "".join(text)
                if parameters.details:
                    message.details = StreamDetails(
                        finish_reason=piece.finish.value,
                        generated_tokens=run.tokens,
                        seed=run.seed,
                        input_length=len(run.spec.prompt),
                        cached_tokens=run.pieces.cached_tokens,
                    )
            lines.append(event(_ENCODER.encode(message)))
        await events.send(lines[0] if len(lines) == 1 else b"".join(lines))


def _token(piece: Piece) -> Token:
    token = piece.token
    # A control token adds nothing to the text, but a reader of tokens is shown which it was.
    text = display_text(token.piece) if token.special else piece.text
    return Token(token.token_id, text, token.logprob, token.special)


def _top_tokens(token: GeneratedToken) -> list[Token]:
    return [Token(a.token_id, display_text(a.piece), a.logprob, a.special) for a in token.alternatives]
