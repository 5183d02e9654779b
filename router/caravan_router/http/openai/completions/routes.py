"""OpenAI's completions. Errors found before the stream began have their real status, as OpenAI and vLLM have it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from aiohttp import web

from caravan_router.core.errors import EngineError
from caravan_router.http.generation.bounds import model_of
from caravan_router.http.generation.candidates import Choices, best_first, choices_of
from caravan_router.http.generation.headers import compute_headers, timing_headers
from caravan_router.http.generation.permits import admitted, validating
from caravan_router.http.generation.prompts import split_prompts
from caravan_router.http.generation.request import ValidRequest
from caravan_router.http.generation.run import Run
from caravan_router.http.generation.runs import collect, started, work_on_all
from caravan_router.http.generation.serving import serving_of
from caravan_router.http.openai.completions.choice import choice_of
from caravan_router.http.openai.completions.echo import Echo, echo_of, first_choice
from caravan_router.http.openai.completions.prompt_logprobs import prompt_logprobs_of
from caravan_router.http.openai.completions.validation import CompletionPlan, validate_completion
from caravan_router.http.openai.schema import Completion, CompletionRequest, PromptLogprob, PromptTokensDetails, Usage
from caravan_router.http.server.body import read_body
from caravan_router.http.server.errors import openai_body
from caravan_router.http.server.event_stream import DONE, EventStream, event
from caravan_router.http.server.state import CLIENT, STATE, AppState
from caravan_router.text.assembler import Piece

_DECODER = msgspec.json.Decoder(CompletionRequest)
_ENCODER = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A request that may begin. ``arrived``: on ``time.monotonic``."""

    body: CompletionRequest
    choices: Choices
    valid: Sequence[ValidRequest]
    arrived: float

    def shown(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        """Without the one that comes along where none was asked for."""
        return () if self.body.max_tokens == 0 else pieces

    def echo(self, index: int, run: Run) -> Echo | None:
        """What goes before the ``index``-th run's text; ``run`` is one of the same prompt whose pieces have begun."""
        prompt = self.valid[index // self.choices.candidates].prompt_text
        if prompt is None or not self.body.echo:
            return None
        return echo_of(prompt, run.pieces.prompt_logprobs, self.body.logprobs)

    def prompt_logprobs(self, index: int, run: Run) -> list[dict[str, PromptLogprob] | None] | msgspec.UnsetType:
        """vLLM's; ``index`` and ``run`` as for `echo`."""
        prompt = self.valid[index // self.choices.candidates].prompt_text
        if prompt is None or self.body.prompt_logprobs is None:
            return msgspec.UNSET
        return prompt_logprobs_of(prompt, run.pieces.prompt_logprobs, self.body.prompt_logprobs)


async def completions(request: web.Request) -> web.StreamResponse:
    """Choices of each prompt, in the order of the prompts."""
    arrived = time.monotonic()
    state, client = request.app[STATE], request[CLIENT]
    body = await read_body(request, _DECODER)
    prompts = split_prompts("prompt", body.prompt, state.limits.max_client_batch_size)
    choices = choices_of(body, state.limits)
    generations = len(prompts) * choices.candidates
    with admitted(state, client, generations):
        with validating(state.metrics, generations):
            serving = serving_of(body, request.headers, client.key, state.limits)
            plan = CompletionPlan(prompts=prompts, choices=choices, serving=serving)
            valid = await validate_completion(state.engine, state.limits, body, plan)
        asked = _Asked(body=body, choices=choices, valid=valid, arrived=arrived)
        return await (_stream(request, asked) if body.stream else _whole(state, asked))


async def _whole(state: AppState, asked: _Asked) -> web.Response:
    with started(state, asked.valid, asked.arrived) as runs:
        collected = await collect(runs)
    reply = _envelope(state, asked)
    per_prompt = asked.choices.candidates
    for first in range(0, len(runs), per_prompt):
        candidates = collected[first : first + per_prompt]
        order = best_first(candidates) if asked.choices.ranked else range(per_prompt)
        echo, prompt_logprobs = asked.echo(first, runs[first]), asked.prompt_logprobs(first, runs[first])
        for index in order[: asked.choices.n]:
            shown = asked.shown(candidates[index])
            choice = first_choice(len(reply.choices), shown, asked.body.logprobs, echo)
            choice.prompt_logprobs = prompt_logprobs
            reply.choices.append(choice)
    reply.usage = _usage(asked, runs)
    headers = timing_headers(state, asked.valid, runs)
    return web.Response(body=_ENCODER.encode(reply), headers=headers, content_type="application/json")


async def _stream(request: web.Request, asked: _Asked) -> web.StreamResponse:
    """Chunks of several choices come as they are ready; each names its choice."""
    state, body = request.app[STATE], asked.body
    include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    envelope = _envelope(state, asked)
    if include_usage:
        envelope.usage = None
    headers = compute_headers(state, sum(one.characters for one in asked.valid))
    async with EventStream(request, headers, state.limits) as events:

        async def send(index: int, run: Run) -> None:
            offset, begun = 0, False
            async for pieces in run.pieces:
                shown = asked.shown(pieces)
                if begun:
                    choice = choice_of(index, shown, offset, body.logprobs)
                else:
                    choice = first_choice(index, shown, body.logprobs, asked.echo(index, run))
                offset, begun = offset + len(choice.text), True
                # Half a character, or a control token: nothing to show yet.
                if choice.text or choice.finish_reason is not None or choice.logprobs is not None:
                    # One chunk object for all choices: it is encoded before anything can change it.
                    envelope.choices = [choice]
                    await events.send(event(_ENCODER.encode(envelope)))

        try:
            with started(state, asked.valid, asked.arrived) as runs:
                await work_on_all(runs, send)
        except EngineError as error:
            await events.send(event(openai_body(error)))
        else:
            if include_usage:
                envelope.choices = []
                envelope.usage = _usage(asked, runs)
                await events.send(event(_ENCODER.encode(envelope)))
        await events.send(DONE)
    return events.response


def _envelope(state: AppState, asked: _Asked) -> Completion:
    model = model_of(state.engine)
    return Completion(
        id=f"cmpl-{time.time_ns():x}",
        object="text_completion",
        created=int(time.time()),
        model=asked.valid[0].specs[0].adapter or model.name,
        system_fingerprint=model.fingerprint,
        choices=[],
    )


def _usage(asked: _Asked, runs: Sequence[Run]) -> Usage:
    prompt = sum(len(request.prompt) for request in asked.valid)
    output = 0 if asked.body.max_tokens == 0 else sum(run.tokens for run in runs)
    # Of a prompt's candidates the first is asked: what the others share with it was not there before.
    cached = sum(run.pieces.cached_tokens for run in runs[:: asked.choices.candidates])
    return Usage(prompt, output, prompt + output, PromptTokensDetails(cached))
