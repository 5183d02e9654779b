"""Replies of ``/generate``, ``/generate_stream`` and ``POST /``, whole and streamed."""

from collections.abc import Sequence
from itertools import chain
from typing import ClassVar

import msgspec

from caravan_dialects.api.errors import ValidationError
from caravan_dialects.api.generation.asked import Answer, Asked
from caravan_dialects.api.generation.context import Context
from caravan_dialects.api.generation.run import Run, ValidRequest, best_first, collect
from caravan_dialects.api.limits import Limits
from caravan_dialects.api.stream import Events
from caravan_dialects.api.tgi.errors import TGI
from caravan_dialects.api.tgi.schema import (
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
from caravan_dialects.api.tgi.validation import candidates_of, parameters_of, validate_generate, wants_details
from caravan_dialects.text.assembler import Piece
from caravan_dialects.text.detokenize import PromptText, display_text
from caravan_scheduler.core.engine import Fleet
from caravan_scheduler.core.errors import TextTooLongError
from caravan_scheduler.core.prompt_media import is_cell
from caravan_scheduler.core.tokens import GeneratedToken

_ENCODER = msgspec.json.Encoder()

Body = GenerateRequest | CompatGenerateRequest


class AskedGenerate(Asked):
    """The output for one prompt.

    When streaming, errors in the request's content become an event after status 200, as in TGI. Load balancers must see
    the others: too many requests (429) and no shard (503) keep their status.
    """

    dialect = TGI
    errors_as_events: ClassVar[tuple[type[Exception], ...]] = (ValidationError, TextTooLongError)

    def __init__(self, body: Body, limits: Limits, *, streamed: bool, as_list: bool = False) -> None:
        """``as_list``: a whole reply is an array of one, as on ``POST /``."""
        self._body = body
        self.model = body.model
        self._parameters = parameters_of(body)
        self._as_list = as_list
        self.streamed = streamed
        self.characters = len(body.inputs)
        self.generations = candidates_of(self._parameters, limits)

    def asks_for(self, header: str, fleet: Fleet) -> str:
        """An adapter says which model it belongs to, too."""
        asked, adapter = super().asks_for(header, fleet), self._parameters.adapter_id or ""
        return asked or (adapter if any(adapter in engine.model.adapters for engine in fleet.engines) else "")

    async def validate(self, context: Context) -> "GenerateAnswer":
        request = await validate_generate(context, self._body, stream=self.streamed)
        return GenerateAnswer(self._body, request, as_list=self._as_list)


class GenerateAnswer(Answer):
    """The best output for one prompt."""

    def __init__(self, body: Body, request: ValidRequest, *, as_list: bool) -> None:
        """``as_list``: a whole reply is an array of one."""
        super().__init__((request,))
        self._prompt_text = request.prompt_text
        self._parameters = parameters_of(body)
        self._as_list = as_list
        self._before = body.inputs if self._parameters.return_full_text else ""

    async def whole(self, runs: Sequence[Run]) -> bytes:
        reply = await self._whole(runs)
        return _ENCODER.encode([reply] if self._as_list else reply)

    async def text(self, runs: Sequence[Run]) -> str:
        """Read all runs and return the text of the best one."""
        return (await self._whole(runs)).generated_text

    async def _whole(self, runs: Sequence[Run]) -> GenerateResponse:
        collected = await collect(runs)
        best = best_first(collected)[0] if len(runs) > 1 else 0
        if not wants_details(self._parameters):
            return GenerateResponse(self._text(collected[best]))
        prefill = _prefill(self._prompt_text, runs[0])
        others = [self._sequence(run, pieces, prefill) for run, pieces in zip(runs, collected, strict=True)]
        chosen = others.pop(best)
        return GenerateResponse(
            chosen.generated_text,
            Details(
                finish_reason=chosen.finish_reason,
                generated_tokens=chosen.generated_tokens,
                # The first candidate computes the prompt, and the others share the result.
                cached_tokens=runs[0].cached_tokens,
                seed=chosen.seed,
                prefill=chosen.prefill,
                tokens=chosen.tokens,
                best_of_sequences=others or msgspec.UNSET,
                top_tokens=chosen.top_tokens,
            ),
        )

    def _text(self, pieces: Sequence[Piece]) -> str:
        """Return the text, after the prompt as the client wrote it if ``return_full_text`` is true."""
        return "".join([self._before, *(piece.text for piece in pieces)])

    def _sequence(self, run: Run, pieces: Sequence[Piece], prefill: list[PrefillToken]) -> BestOfSequence:
        assert run.finish is not None
        return BestOfSequence(
            generated_text=self._text(pieces),
            finish_reason=run.finish.value,
            generated_tokens=run.tokens,
            seed=run.seed,
            prefill=prefill,
            tokens=[_token(piece) for piece in pieces],
            top_tokens=[_top_tokens(piece.token) for piece in pieces]
            if self._parameters.top_n_tokens
            else msgspec.UNSET,
        )

    async def send(self, events: Events, index: int, run: Run) -> None:
        top_tokens = bool(self._parameters.top_n_tokens)
        text = [self._before]
        number = 0
        async for ready in run:
            messages = []
            for piece in chain.from_iterable(ready):
                number += 1
                text.append(piece.text)
                message = StreamEvent(
                    number, _token(piece), None, None, _top_tokens(piece.token) if top_tokens else msgspec.UNSET
                )
                if piece.finish is not None:
                    message.generated_text = "".join(text)
                    if self._parameters.details:
                        message.details = StreamDetails(
                            finish_reason=piece.finish.value,
                            generated_tokens=run.tokens,
                            seed=run.seed,
                            input_length=len(run.spec.prompt),
                            cached_tokens=run.cached_tokens,
                        )
                messages.append(_ENCODER.encode(message))
            await events.send(*messages)


def _prefill(prompt: PromptText | None, run: Run) -> list[PrefillToken]:
    """Return the tokens of the prompt's text as the model saw them, without those that ``truncate`` cut off."""
    if prompt is None:
        return []
    columns = (prompt.tokenized.token_ids, prompt.tokenized.pieces, run.prompt_logprobs)
    return [
        PrefillToken(token_id, display_text(piece), entry.logprob)
        for token_id, piece, entry in zip(*columns, strict=True)
        if not is_cell(token_id)
    ]


def _token(piece: Piece) -> Token:
    token = piece.token
    # A control token adds nothing to the text, but readers of tokens see which it was.
    text = display_text(token.piece) if token.special else piece.text
    return Token(token.token_id, text, token.logprob, token.special)


def _top_tokens(token: GeneratedToken) -> list[Token]:
    return [Token(a.token_id, display_text(a.piece), a.logprob, a.special) for a in token.alternatives]
