"""The calls that a model of this process and a server have alike, awaited and blocking, over what generates."""

import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar, Unpack

from caravan.errors import RequestError
from caravan.outputs import RequestOutput
from caravan.prompts import (
    CHAT_PARAMS,
    ChatCall,
    ChatOptions,
    Messages,
    PlainPrompt,
    Prompt,
    Prompts,
    chat_fields_of,
    params_or,
    plain_prompt,
    plain_prompts,
    split_conversations,
)
from caravan.sampling_params import SamplingParams
from caravan.twins import AsyncClosing, Closing, Twin, iterated

OnOutput = Callable[[RequestOutput], None]
_T = TypeVar("_T")
# For all prompts, or one entry for each.
ParamsOfEach = SamplingParams | Sequence[SamplingParams] | None
# Shorter work needs no progress bar, in seconds.
_SHORT_S = 1.0


class Model(Protocol):
    """Generates for calls that are plain: one entry of everything for each prompt or conversation.

    ``on_output`` is called with each output when it is there. A stream ends
    its generation when it is closed.
    """

    async def generate(
        self, prompts: Sequence[PlainPrompt], params: Sequence[SamplingParams], adapter: str, on_output: OnOutput
    ) -> list[RequestOutput]: ...

    def stream(
        self, prompt: PlainPrompt, params: SamplingParams, adapter: str
    ) -> AsyncGenerator[RequestOutput, None]: ...

    async def chat(
        self, conversations: Sequence[Messages], params: Sequence[SamplingParams], call: ChatCall, on_output: OnOutput
    ) -> list[RequestOutput]: ...

    def stream_chat(
        self, messages: Messages, params: SamplingParams, call: ChatCall
    ) -> AsyncGenerator[RequestOutput, None]: ...


class Calls(AsyncClosing):
    """The calls that `caravan.AsyncLLM` and `caravan.AsyncClient` have alike."""

    def _model(self) -> Model:
        """Return what generates. Raises ClosedError."""
        raise NotImplementedError

    async def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run ``work`` on the event loop of the model, which is that of the caller unless a subclass says otherwise."""
        return await work

    def _iterate(self, items: AsyncGenerator[_T, None]) -> AsyncGenerator[_T, None]:
        """Yield ``items`` of the event loop of the model."""
        return items

    async def generate(
        self, prompts: Prompts, sampling_params: ParamsOfEach = None, *, adapter: str = ""
    ) -> list[RequestOutput]:
        """See `caravan.LLM.generate`."""
        plain, params = _plain(prompts, sampling_params)
        return await self._run(self._model().generate(plain, params, adapter, _ignore))

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, adapter: str = ""
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the parts of the outputs of one prompt as they come, each with one entry in ``outputs``.

        The texts of the parts of an index, joined, are its output. From a server, ``num_prompt_tokens`` and
        ``num_cached_tokens`` are known in the last part, and 0 before. Closing the iterator ends the generation.
        """
        return self._iterate(self._model().stream(plain_prompt(prompt), params_or(sampling_params), adapter))

    async def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: ParamsOfEach = None,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """See `caravan.LLM.chat`."""
        conversations, params = _conversations(messages, sampling_params)
        return await self._run(self._model().chat(conversations, params, _chat(options), _ignore))

    def stream_chat(
        self, messages: Messages, sampling_params: SamplingParams | None = None, **options: Unpack[ChatOptions]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the parts of the answers to one conversation as they come; tool calls are in the last part of each.

        The parameters are those of `caravan.LLM.chat`.
        """
        params = params_or(sampling_params, CHAT_PARAMS)
        return self._iterate(self._model().stream_chat(messages, params, _chat(options)))


_C_co = TypeVar("_C_co", bound=Calls, covariant=True)


class BlockingCalls(Twin[_C_co], Closing):
    """The calls that `caravan.LLM` and `caravan.Client` have alike."""

    def generate(
        self, prompts: Prompts, sampling_params: ParamsOfEach = None, *, adapter: str = "", use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Continue all prompts; return one entry for each, in their order. If one fails, those that run are ended.

        ``sampling_params``: for all prompts, or one entry for each. ``adapter``: the name of one of the model's.
        ``use_tqdm``: show the progress of work of over a second, on a terminal or in a notebook.
        """
        plain, params = _plain(prompts, sampling_params)
        with _progress(len(plain), shown=use_tqdm) as on_output:
            return self._loop.run(self._awaited._model().generate(plain, params, adapter, on_output))

    stream = iterated(Calls.stream)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: ParamsOfEach = None,
        *,
        use_tqdm: bool = True,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Answer one conversation, or several; return one entry for each.

        ``messages`` and ``tools`` have OpenAI's form. ``tool_choice``: "auto", "none", "required" or the name of a
        function. ``schema``: a JSON schema that the answer matches, as an object, as text or as a pydantic class.
        ``chat_template_kwargs``: further variables of the model's template. ``truncation``: "auto" leaves out the
        oldest turns if not all fit, and `RequestOutput.left_out` has their places; "disabled", the default, refuses.
        ``adapter``, ``use_tqdm``: see `generate`.
        Without ``sampling_params``, an answer may have as many tokens as fit. A server keeps nothing of it: see
        `caravan.Client.create_conversation` for conversations that it keeps.
        """
        conversations, params = _conversations(messages, sampling_params)
        with _progress(len(conversations), shown=use_tqdm) as on_output:
            return self._loop.run(self._awaited._model().chat(conversations, params, _chat(options), on_output))

    stream_chat = iterated(Calls.stream_chat)


def _plain(prompts: Prompts, params: ParamsOfEach) -> tuple[list[PlainPrompt], list[SamplingParams]]:
    plain = plain_prompts(prompts)
    return plain, _for_each(params, SamplingParams(), len(plain))


def _conversations(
    messages: Messages | Sequence[Messages], params: ParamsOfEach
) -> tuple[list[Messages], list[SamplingParams]]:
    conversations = split_conversations(messages)
    return conversations, _for_each(params, CHAT_PARAMS, len(conversations))


def _for_each(params: Any, otherwise: SamplingParams, count: int) -> list[SamplingParams]:
    """Return the parameters of each of ``count`` prompts, ``otherwise`` for None. Raises RequestError."""
    if not isinstance(params, list | tuple):
        return [params_or(params, otherwise)] * count
    if len(params) != count:
        raise RequestError(f"there must be one entry of sampling_params for each of {count}. Given: {len(params)}")
    return [params_or(one, otherwise) for one in params]


def _chat(options: ChatOptions) -> ChatCall:
    """Raises TypeError."""
    return ChatCall(chat_fields_of(options, ChatOptions), options.get("adapter", ""))


def _ignore(_output: RequestOutput) -> None:
    """Take an output that is not counted."""


@contextmanager
def _progress(total: int, *, shown: bool) -> Iterator[Callable[[RequestOutput], None]]:
    """Yield what to call with each output that is ready; shows how many are, on a terminal or in a notebook."""
    if not (shown and total > 1):
        yield _ignore
        return
    from caravan_models.bars import new_bar, shows_bars

    if not shows_bars(sys.stderr):
        yield _ignore
        return
    with new_bar(total=total, desc="prompts", delay=_SHORT_S) as bar:
        tokens = 0

        def on_output(output: RequestOutput) -> None:
            nonlocal tokens
            tokens += sum(len(completion.token_ids) for completion in output.outputs)
            if elapsed := bar.format_dict["elapsed"]:
                bar.set_postfix_str(f"{tokens / elapsed:.0f} tokens/s", refresh=False)
            bar.update()

        yield on_output
