"""A model with calls that block: vLLM's ``LLM``, over Caravan's scheduler and llama.cpp."""

import sys
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from caravan.errors import RequestError
from caravan.opened import OpenedModel
from caravan.options import ModelOptions
from caravan.outputs import EmbeddingRequestOutput, RequestOutput, ScoringRequestOutput
from caravan.prompts import Prompt, Prompts, plain_prompts
from caravan.sampling_params import SamplingParams

_T = TypeVar("_T")

Message = Mapping[str, Any]
Messages = Sequence[Message]

# Shorter work needs no progress bar, in seconds.
_SHORT_S = 1.0
# Nobody waits for the next token of a list of prompts, so that steps may have larger chunks of prompts. For 64 prompts
# of 100 words and 64 tokens each, that is 3 to 6 % faster than the default of a server.
_TARGET_ITL_MS = 1000.0


class LLM:
    """A GGUF model in this process. Use it as a context manager, or `close` it; else it ends with the program.

    All prompts of all calls are batched continuously, as by ``caravan serve``. Any thread may call; each call blocks
    its own thread only. An exception in a call, Ctrl-C among them, ends the generations of that call and no others.

    Every generating call raises RequestError if a prompt or a parameter breaks a rule, in which case nothing has run,
    GenerationError if a generation could not continue, and ClosedError if the model is closed.
    """

    def __init__(self, model: str | Path, **options: Unpack[ModelOptions]) -> None:
        """Load ``model``, a GGUF file. By default prompts of a list are prefilled fast (``target_itl_ms=1000``).

        Raises ModelError, and TypeError or ValueError if an option is wrong.
        """
        self._opened = OpenedModel(model, {"target_itl_ms": _TARGET_ITL_MS} | options)
        # Also at the end of the program.
        self._close = weakref.finalize(self, self._opened.close)

    def close(self) -> None:
        """End what runs, and free the model. Closing it again does nothing."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str = "",
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue all prompts; return one entry for each, in their order.

        ``sampling_params``: for all prompts, or one entry for each. ``adapter``: the name of one of the model's.
        ``use_tqdm``: show the progress of long work, if standard error is a terminal.
        """
        plain = plain_prompts(prompts)
        params = for_each(sampling_params or SamplingParams(), len(plain))
        with progress(len(plain), shown=use_tqdm) as on_output:
            return self._opened.loop.run(self._opened.local.generate(plain, params, adapter, on_output))

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, adapter: str = ""
    ) -> Iterator[RequestOutput]:
        """Yield the parts of the outputs of one prompt as they come, each with one entry in ``outputs``.

        The texts of the parts of an index, joined, are its output. Closing the iterator ends the generation.
        """
        (plain,) = plain_prompts(prompt)
        params = sampling_params or SamplingParams()
        return self._iterate(self._opened.local.stream(plain, params, adapter))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        schema: Any = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        adapter: str = "",
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several; return one entry for each.

        ``messages`` and ``tools`` have OpenAI's form. ``tool_choice``: "auto", "none", "required" or the name of a
        function. ``schema``: a JSON schema that the answer matches, as an object, as text or as a pydantic class.
        Without ``sampling_params``, an answer may have as many tokens as fit.
        """
        conversations = split_conversations(messages)
        params = for_each(sampling_params or CHAT_PARAMS, len(conversations))
        options = chat_options(tools, tool_choice, schema, chat_template_kwargs)
        with progress(len(conversations), shown=use_tqdm) as on_output:
            return self._opened.loop.run(self._opened.local.chat(conversations, params, options, adapter, on_output))

    def stream_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        schema: Any = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        adapter: str = "",
    ) -> Iterator[RequestOutput]:
        """Yield the parts of the answers to one conversation as they come; tool calls are in the last part of each."""
        options = chat_options(tools, tool_choice, schema, chat_template_kwargs)
        params = sampling_params or CHAT_PARAMS
        return self._iterate(self._opened.local.stream_chat(messages, params, options, adapter))

    def embed(self, prompts: Prompts) -> list[EmbeddingRequestOutput]:
        """Return a vector of length 1 for each text. The model needs the option ``embeddings``."""
        return self._opened.loop.run(self._opened.local.embed(plain_prompts(prompts)))

    def score(self, data_1: str | Sequence[str], data_2: str | Sequence[str]) -> list[ScoringRequestOutput]:
        """Score the n-th text of ``data_1`` with the n-th of ``data_2``; a single text is paired with all of the other.

        The model needs the option ``embeddings``.
        """
        return self._opened.loop.run(self._opened.local.score(texts_of(data_1), texts_of(data_2)))

    def tokenize(self, text: str, *, add_special: bool = True) -> list[int]:
        """Return the token ids of ``text``, with what the model puts around a prompt if ``add_special``."""
        return self._opened.loop.run(self._opened.local.tokenize(text, add_special=add_special))

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of ``token_ids``, without control tokens."""
        return self._opened.loop.run(self._opened.local.detokenize(token_ids))

    def _iterate(self, items: AsyncGenerator[_T, None]) -> Iterator[_T]:
        return self._opened.loop.iterate(items)


# As many tokens as fit.
CHAT_PARAMS = SamplingParams(max_tokens=None)


def for_each(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    """Return the parameters of each of ``count`` prompts. Raises RequestError."""
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise RequestError(f"there must be one entry of sampling_params for each of {count}. Given: {len(params)}")
    return list(params)


def split_conversations(messages: Messages | Sequence[Messages]) -> list[Messages]:
    """Return the conversations: ``messages`` may be one, or a list of them."""
    if messages and not isinstance(messages[0], Mapping):
        return list(messages)  # type: ignore[arg-type]
    return [messages]  # type: ignore[list-item]


def chat_options(
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str | Mapping[str, Any] | None,
    schema: Any,
    chat_template_kwargs: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the fields of a chat request that are no sampling parameters."""
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    return {
        "tools": None if tools is None else list(tools),
        "tool_choice": tool_choice,
        "json_schema": schema,
        "chat_template_kwargs": chat_template_kwargs,
    }


def texts_of(data: str | Sequence[str]) -> list[str]:
    """Return the texts: ``data`` may be one, or a list of them."""
    return [data] if isinstance(data, str) else list(data)


@contextmanager
def progress(total: int, *, shown: bool) -> Iterator[Callable[[RequestOutput], None]]:
    """Yield what to call with each output that is ready; shows how many are, if tqdm is installed."""
    if not (shown and total > 1 and sys.stderr.isatty()):
        yield lambda _output: None
        return
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda _output: None
        return
    with tqdm(total=total, desc="prompts", delay=_SHORT_S, dynamic_ncols=True) as bar:
        yield lambda _output: bar.update() and None
