"""Turns replies, whole and streamed, into the outputs that `caravan.LLM` returns, and into responses."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from caravan.client.connection import Answer
from caravan.client.errors import BadReplyError, read_event_failure, response_failure
from caravan.client.outputs import Response, ResponsePart, ResponseUsage
from caravan.outputs import CompletionOutput, Logprob, RequestOutput, ToolCall
from caravan.prompts import PlainPrompt
from caravan_dialects.api.openai.chat.schema import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    LeftOut,
    ToolCallDelta,
)
from caravan_dialects.api.openai.completions.schema import Completion, CompletionChoice, PromptLogprob
from caravan_dialects.api.openai.responses.schema import ResponseEvent, ResponseObject
from caravan_dialects.api.openai.schema import Usage

# The text and the logprob of each token.
_Entries = Sequence[tuple[str, float | None]]
_T = TypeVar("_T")
_D = TypeVar("_D")

_LAST = frozenset({"response.completed", "response.incomplete"})


def read_completion(prompt: PlainPrompt, answer: Answer) -> RequestOutput:
    """Return the outputs of one prompt. Raises BadReplyError."""
    reply = answer.read(Completion)
    if not reply.choices:
        raise BadReplyError("the reply has no choices")
    # All choices have the same prompt.
    first = reply.choices[0]
    prompt_tokens, cached_tokens = _prompt_counts(reply.usage)
    return RequestOutput(
        request_id=answer.request_id,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=_ids(first.prompt_token_ids),
        outputs=[_completion_output(choice) for choice in reply.choices],
        finished=True,
        num_prompt_tokens=prompt_tokens,
        num_cached_tokens=cached_tokens,
        prompt_logprobs=_prompt_logprobs(first.prompt_logprobs),
    )


def read_chat(answer: Answer) -> RequestOutput:
    """Return the answers to one conversation. Raises BadReplyError."""
    reply = answer.read(ChatCompletion)
    outputs = []
    for choice in reply.choices:
        message = choice.message
        output = CompletionOutput(
            index=choice.index,
            text=message.content or "",
            token_ids=_ids(choice.token_ids),
            finish_reason=choice.finish_reason,
            reasoning=_given(message.reasoning_content, ""),
            tool_calls=[
                ToolCall(call.id, call.function.name, call.function.arguments)
                for call in _given(message.tool_calls, [])
            ],
        )
        outputs.append(_with_logprobs(output, _chat_entries(choice.logprobs)))
    prompt_tokens, cached_tokens = _prompt_counts(reply.usage)
    return RequestOutput(
        request_id=answer.request_id,
        prompt=None,
        prompt_token_ids=_ids(reply.prompt_token_ids),
        outputs=outputs,
        finished=True,
        num_prompt_tokens=prompt_tokens,
        num_cached_tokens=cached_tokens,
        left_out=_left_out(reply.truncated),
    )


@dataclass(frozen=True, slots=True)
class Chunk:
    """One event of a stream: parts of outputs, and what some events have beside them."""

    outputs: Sequence[CompletionOutput]
    prompt_token_ids: list[int] | None
    usage: Usage | None
    left_out: Sequence[int] = ()


def read_completion_chunk(event: str) -> Chunk:
    """Return a chunk of a completion. Raises MsgspecError, BadReplyError."""
    chunk = msgspec.json.decode(event, type=Completion)
    ids = next((_ids(choice.prompt_token_ids) for choice in chunk.choices if choice.prompt_token_ids), None)
    return Chunk([_completion_output(choice) for choice in chunk.choices], ids, _given(chunk.usage, None))


class ChatChunks:
    """Reads the chunks of a chat. The calls of an answer are in its last part, whole."""

    def __init__(self) -> None:
        # The calls so far of each choice: id, name, and the pieces of the arguments.
        self._calls: dict[int, list[tuple[str, str, list[str]]]] = {}

    def __call__(self, event: str) -> Chunk:
        """Return a chunk. Raises MsgspecError, BadReplyError."""
        chunk = msgspec.json.decode(event, type=ChatCompletionChunk)
        outputs = []
        for choice in chunk.choices:
            delta = choice.delta
            self._take(choice.index, _given(delta.tool_calls, []))
            calls = [] if choice.finish_reason is None else self._calls.get(choice.index, [])
            output = CompletionOutput(
                index=choice.index,
                text=_given(delta.content, ""),
                token_ids=_ids(choice.token_ids),
                finish_reason=choice.finish_reason,
                reasoning=_given(delta.reasoning_content, ""),
                tool_calls=[ToolCall(call_id, name, "".join(arguments)) for call_id, name, arguments in calls],
            )
            outputs.append(_with_logprobs(output, _chat_entries(choice.logprobs)))
        ids, usage = _given(chunk.prompt_token_ids, None), _given(chunk.usage, None)
        return Chunk(outputs, ids, usage, _left_out(chunk.truncated))

    def _take(self, choice: int, deltas: Sequence[ToolCallDelta]) -> None:
        calls = self._calls.setdefault(choice, [])
        for delta in deltas:
            call_id, name = delta.id, delta.function.name
            if call_id is not msgspec.UNSET and name is not msgspec.UNSET:
                calls.append((call_id, name, []))
            if delta.index >= len(calls):
                raise BadReplyError("a call has no id or no name")
            calls[delta.index][2].append(delta.function.arguments)


class OutputReader:
    """Reads a stream of the parts of ``outputs`` outputs of one prompt.

    The last part waits for the event that counts the tokens.
    """

    def __init__(self, request_id: str, prompt: PlainPrompt | None, outputs: int, read: Callable[[str], Chunk]) -> None:
        """``read`` turns an event into a chunk."""
        self._request_id = request_id
        self._prompt = prompt if isinstance(prompt, str) else None
        self._read = read
        self._prompt_token_ids: Sequence[int] = ()
        self._left_out: Sequence[int] = ()
        self._unfinished = outputs
        self._last: RequestOutput | None = None
        self.ended = False

    def read(self, event: str) -> Iterator[RequestOutput]:
        """Yield the parts that an event completes. Raises ApiError, BadReplyError, MsgspecError."""
        if event == "[DONE]":
            return
        with _named_failure(event, self._request_id):
            chunk = self._read(event)
        self._left_out = chunk.left_out or self._left_out
        if chunk.prompt_token_ids is not None:
            self._prompt_token_ids = chunk.prompt_token_ids
        for output in chunk.outputs:
            self._unfinished -= output.finish_reason is not None
            part = self._part(output)
            if self._unfinished:
                yield part
            else:
                self._last = part
        if self._last is not None and chunk.usage is not None:
            self.ended = True
            prompt, cached = _prompt_counts(chunk.usage)
            yield replace(self._last, finished=True, num_prompt_tokens=prompt, num_cached_tokens=cached)

    def _part(self, output: CompletionOutput) -> RequestOutput:
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[output],
            finished=False,
            num_prompt_tokens=0,
            num_cached_tokens=0,
            left_out=self._left_out,
        )


def _left_out(truncated: LeftOut | msgspec.UnsetType) -> Sequence[int]:
    return () if truncated is msgspec.UNSET else truncated.messages


def _completion_output(choice: CompletionChoice) -> CompletionOutput:
    output = CompletionOutput(
        index=choice.index, text=choice.text, token_ids=_ids(choice.token_ids), finish_reason=choice.finish_reason
    )
    columns = choice.logprobs
    if columns is None:
        return output
    return _with_logprobs(output, list(zip(columns.tokens, columns.token_logprobs, strict=False)))


def _chat_entries(logprobs: ChatLogprobs | None) -> _Entries | None:
    return None if logprobs is None else [(entry.token, entry.logprob) for entry in logprobs.content]


def _with_logprobs(output: CompletionOutput, entries: _Entries | None) -> CompletionOutput:
    """Add the logprobs of the output's own tokens. Raises BadReplyError."""
    if entries is None:
        return output
    if len(entries) != len(output.token_ids):
        raise BadReplyError(f"the reply has {len(entries)} log probabilities for {len(output.token_ids)} tokens")
    logprobs = [
        {} if logprob is None else {token_id: Logprob(logprob, None, text)}
        for token_id, (text, logprob) in zip(output.token_ids, entries, strict=True)
    ]
    return replace(output, logprobs=logprobs, cumulative_logprob=sum(logprob or 0.0 for _, logprob in entries))


def _prompt_logprobs(
    given: list[dict[str, PromptLogprob] | None] | msgspec.UnsetType | None,
) -> list[dict[int, Logprob] | None] | None:
    if given is msgspec.UNSET or given is None:
        return None
    return [
        None
        if entry is None
        else {int(token_id): Logprob(one.logprob, one.rank, one.decoded_token) for token_id, one in entry.items()}
        for entry in given
    ]


def _ids(given: list[int] | msgspec.UnsetType | None) -> list[int]:
    """Raises BadReplyError if the server does not know the field that asks for token ids."""
    if given is msgspec.UNSET or given is None:
        raise BadReplyError("the reply has no token ids. Is the URL that of a Caravan server?")
    return given


def _given(value: _T | msgspec.UnsetType, default: _D) -> _T | _D:
    return default if value is msgspec.UNSET else value


@contextmanager
def _named_failure(event: str, request_id: str) -> Iterator[None]:
    """Raise the error that an event is, where it was taken for something else."""
    try:
        yield
    except msgspec.MsgspecError:
        failure = read_event_failure(event, request_id)
        if failure is None:
            raise
        raise failure from None


def _prompt_counts(given: Usage | msgspec.UnsetType | None) -> tuple[int, int]:
    """Return how many tokens a prompt has, and how many of them were in the cache."""
    usage = _given(given, None)
    return (0, 0) if usage is None else (usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens)


def read_response(reply: ResponseObject, request_id: str) -> Response:
    """Return a response that has ended. Raises BadReplyError."""
    calls = [item for item in reply.output if item.get("type") == "function_call"]
    try:
        return Response(
            id=reply.id,
            model=reply.model,
            status=reply.status,
            incomplete_reason="" if reply.incomplete_details is None else reply.incomplete_details.reason,
            items=reply.output,
            text=_text(reply.output, "message", "output_text"),
            reasoning=_text(reply.output, "reasoning", "reasoning_text"),
            tool_calls=[ToolCall(item["call_id"], item["name"], item["arguments"]) for item in calls],
            usage=_response_usage(reply),
            left_out=[] if reply.truncated is None else reply.truncated.items,
            request_id=request_id,
        )
    except (KeyError, TypeError) as error:
        raise BadReplyError(f"an item of the response is none of Caravan's: {error!r}") from None


def _response_usage(reply: ResponseObject) -> ResponseUsage:
    if reply.usage is None:
        raise BadReplyError("the response has no usage")
    return ResponseUsage(
        input_tokens=reply.usage.input_tokens,
        cached_tokens=reply.usage.input_tokens_details.cached_tokens,
        output_tokens=reply.usage.output_tokens,
        reasoning_tokens=reply.usage.output_tokens_details.reasoning_tokens,
    )


def _text(items: Iterable[Mapping[str, Any]], item_type: str, part_type: str) -> str:
    """Return the text of all parts of one type, in items of one type."""
    return "".join(
        part["text"]
        for item in items
        if item.get("type") == item_type
        for part in item.get("content") or ()
        if part.get("type") == part_type
    )


class ResponseReader:
    """Reads a streamed response."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._response_id = ""
        self.ended = False

    def read(self, event: str) -> Iterator[ResponsePart]:
        """Yield the parts that an event completes. Raises ApiError, BadReplyError, MsgspecError."""
        with _named_failure(event, self._request_id):
            decoded = msgspec.json.decode(event, type=ResponseEvent)
        match decoded.type:
            case "response.created":
                self._response_id = _response(decoded).id
                yield ResponsePart(response_id=self._response_id)
            case "response.output_text.delta":
                yield ResponsePart(response_id=self._response_id, text=_given(decoded.delta, ""))
            case "response.reasoning_text.delta":
                yield ResponsePart(response_id=self._response_id, reasoning=_given(decoded.delta, ""))
            case "response.failed":
                error = _response(decoded).error
                if error is None:
                    raise BadReplyError("the response failed without an error")
                raise response_failure(error.code, error.message, self._request_id)
            case kind if kind in _LAST:
                self.ended = True
                whole = read_response(_response(decoded), self._request_id)
                yield ResponsePart(response_id=self._response_id, response=whole)
            case _:
                # Other events repeat what these say.
                pass


def _response(event: ResponseEvent) -> ResponseObject:
    if event.response is msgspec.UNSET:
        raise BadReplyError(f"the event {event.type} has no response")
    return event.response
