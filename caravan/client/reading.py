"""Turns replies to completions and chats into the outputs that `caravan.LLM` returns."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from caravan.client.connection import Answer
from caravan.client.errors import BadReplyError
from caravan.client.failures import read_event_failure
from caravan.outputs import CompletionOutput, Logprob, RequestOutput, ToolCall
from caravan.prompts import PlainPrompt
from caravan_dialects.api.openai.chat.schema import ChatCompletion, ChatCompletionChunk, ChatLogprobs, ToolCallDelta
from caravan_dialects.api.openai.completions.schema import Completion, CompletionChoice, PromptLogprob
from caravan_dialects.api.openai.schema import Usage

# The text and the logprob of each token.
_Entries = Sequence[tuple[str, float | None]]


def read_completion(prompt: PlainPrompt, answer: Answer) -> RequestOutput:
    """Return the outputs of one prompt. Raises BadReplyError."""
    reply = answer.read(Completion)
    if not reply.choices:
        raise BadReplyError("the reply has no choices")
    # All choices have the same prompt.
    first = reply.choices[0]
    return RequestOutput(
        request_id=answer.request_id,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=_ids(first.prompt_token_ids),
        outputs=[_completion_output(choice) for choice in reply.choices],
        finished=True,
        num_cached_tokens=_cached(reply.usage),
        prompt_logprobs=_prompt_logprobs(first.prompt_logprobs),
    )


def read_chat(answer: Answer) -> RequestOutput:
    """Return the answers to one conversation. Raises BadReplyError."""
    reply = answer.read(ChatCompletion)
    outputs = []
    for choice in reply.choices:
        message = choice.message
        calls = [] if message.tool_calls is msgspec.UNSET else message.tool_calls
        output = CompletionOutput(
            index=choice.index,
            text=message.content or "",
            token_ids=_ids(choice.token_ids),
            finish_reason=choice.finish_reason,
            reasoning="" if message.reasoning_content is msgspec.UNSET else message.reasoning_content,
            tool_calls=[ToolCall(call.id, call.function.name, call.function.arguments) for call in calls],
        )
        outputs.append(_with_logprobs(output, _chat_entries(choice.logprobs)))
    return RequestOutput(
        request_id=answer.request_id,
        prompt=None,
        prompt_token_ids=_ids(reply.prompt_token_ids),
        outputs=outputs,
        finished=True,
        num_cached_tokens=_cached(reply.usage),
    )


@dataclass(frozen=True, slots=True)
class Chunk:
    """One event of a stream: parts of outputs, and what some events have beside them."""

    outputs: Sequence[CompletionOutput]
    prompt_token_ids: list[int] | None
    usage: Usage | None


def read_completion_chunk(event: str) -> Chunk:
    """Return a chunk of a completion. Raises MsgspecError, BadReplyError."""
    chunk = msgspec.json.decode(event, type=Completion)
    ids = next((_ids(choice.prompt_token_ids) for choice in chunk.choices if choice.prompt_token_ids), None)
    return Chunk([_completion_output(choice) for choice in chunk.choices], ids, _usage(chunk.usage))


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
            if delta.tool_calls is not msgspec.UNSET:
                self._take(choice.index, delta.tool_calls)
            calls = [] if choice.finish_reason is None else self._calls.get(choice.index, [])
            output = CompletionOutput(
                index=choice.index,
                text="" if delta.content is msgspec.UNSET else delta.content,
                token_ids=_ids(choice.token_ids),
                finish_reason=choice.finish_reason,
                reasoning="" if delta.reasoning_content is msgspec.UNSET else delta.reasoning_content,
                tool_calls=[ToolCall(call_id, name, "".join(arguments)) for call_id, name, arguments in calls],
            )
            outputs.append(_with_logprobs(output, _chat_entries(choice.logprobs)))
        ids = None if chunk.prompt_token_ids is msgspec.UNSET else chunk.prompt_token_ids
        return Chunk(outputs, ids, _usage(chunk.usage))

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
        self._unfinished = outputs
        self._last: RequestOutput | None = None
        self.ended = False

    def read(self, event: str) -> Iterator[RequestOutput]:
        """Yield the parts that an event completes. Raises ApiError, BadReplyError, MsgspecError."""
        if event == "[DONE]":
            return
        try:
            chunk = self._read(event)
        except msgspec.MsgspecError:
            failure = read_event_failure(event, self._request_id)
            if failure is None:
                raise
            raise failure from None
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
            yield replace(self._last, finished=True, num_cached_tokens=_cached(chunk.usage))

    def _part(self, output: CompletionOutput) -> RequestOutput:
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[output],
            finished=False,
            num_cached_tokens=0,
        )


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


def _usage(given: Usage | msgspec.UnsetType | None) -> Usage | None:
    return None if given is msgspec.UNSET else given


def _cached(given: Usage | msgspec.UnsetType | None) -> int:
    usage = _usage(given)
    return 0 if usage is None else usage.prompt_tokens_details.cached_tokens
