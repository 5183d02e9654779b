"""A model in this process, which runs on its own thread, and its calls, awaited on its event loop."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from caravan.background import BackgroundLoop
from caravan.calls import Calls, Model
from caravan.errors import ClosedError, ModelError
from caravan.outputs import EmbeddingRequestOutput, ScoringRequestOutput
from caravan.prompts import Messages, PromptOptions, Prompts, chat_fields_of, check_text, plain_prompts, token_ids_of
from caravan.sampling_params import SamplingParams

if TYPE_CHECKING:
    from caravan_dialects.api.openai.decisions.schema import Decision


class OpenedModel:
    """Opens a model. The code that makes it closes it."""

    def __init__(self, model: str | Path, options: Mapping[str, Any]) -> None:
        """Load the model. Raises ModelError, and TypeError or ValueError for options."""
        # Imported here, so that importing the package is quick and needs neither router nor shard.
        from caravan_proto.packages import Part, lack

        if lacking := lack(Part.LIBRARY):
            raise ModelError(f"a model in this process {lacking}")
        from caravan.local_model import LocalModel

        self.local: LocalModel = LocalModel(model, options)
        self.loop = BackgroundLoop()
        try:
            self.loop.run(self.local.open(self.loop.fail))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End what runs, and free the model. Closing it again does nothing."""
        self.loop.close(self.local.close)


class ModelCalls(Calls):
    """What `caravan.LLM` and `caravan.AsyncLLM` have alike."""

    def __init__(self, opened: OpenedModel | None) -> None:
        """``opened``: None until there is a model."""
        self._opened = opened

    def _use(self) -> OpenedModel:
        """Return the model. Raises ClosedError."""
        if self._opened is None:
            raise ClosedError("the model is not open: use `async with`")
        return self._opened

    def _model(self) -> Model:
        return self._use().local

    async def embed(self, prompts: Prompts) -> list[EmbeddingRequestOutput]:
        """Return a vector of length 1 for each text.

        The model needs the option ``embeddings``, unless it can do nothing else.
        """
        return await self._run(self._use().local.embed(plain_prompts(prompts)))

    async def score(self, data_1: str | Sequence[str], data_2: str | Sequence[str]) -> list[ScoringRequestOutput]:
        """Score the n-th text of ``data_1`` with the n-th of ``data_2``; a single text is paired with all of the other.

        The model needs the option ``embeddings``, unless it can do nothing else.
        """
        return await self._run(self._use().local.score(_texts_of(data_1), _texts_of(data_2)))

    async def decide(
        self,
        input: str | Sequence[Mapping[str, Any]],  # as in OpenAI's client
        questions: Sequence[Mapping[str, Any]],
        *,
        average_orders: bool = False,
    ) -> "Decision":
        """Answer questions about one input with probabilities, without generating text.

        ``input`` and ``questions`` are those of OpenAI's `/v1/decisions`, see docs/http-api.md. The input is computed
        once. ``average_orders``: ask each question with its options in both orders, and average.

        Raises RequestError, ContextLengthError, GenerationError.
        """
        return await self._run(self._use().local.decide(input, questions, average_orders=average_orders))

    async def tokenize(self, text: str, *, add_special: bool = True) -> list[int]:
        """Return the token ids of ``text``, with what the model puts around a prompt if ``add_special``."""
        check_text(text)
        return await self._run(self._use().local.tokenize(text, add_special=add_special))

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of ``token_ids``, without control tokens."""
        return await self._run(self._use().local.detokenize(token_ids_of(token_ids)))

    async def load_adapter(self, name: str, path: str | Path, *, scale: float = 1.0, replace: bool = False) -> None:
        """Load a LoRA adapter, a GGUF file made for this model, while other calls run; ``adapter=name`` selects it.

        Its effect is multiplied by ``scale``. ``replace``: if an adapter of this name is loaded, let this one take its
        place. At most ``max_loras`` may be loaded at a time. Raises RequestError.
        """
        await self._run(self._use().local.adapters.load(name, path, scale, replace=replace))

    async def unload_adapter(self, name: str) -> None:
        """Let no new call name an adapter that `load_adapter` has loaded. It is freed when those that run have ended.

        Raises RequestError if there is none.
        """
        await self._run(self._use().local.adapters.unload(name))

    async def list_adapters(self) -> list[str]:
        """Return the names of all adapters: those of the option ``lora``, then those that were loaded later."""
        return await self._run(self._use().local.adapters.names())

    async def get_default_sampling_params(self) -> SamplingParams:
        """Return what the model's options and its file say of sampling, as `SamplingParams` with nothing set has it."""
        return self._use().local.default_params

    async def apply_chat_template(
        self, messages: Messages, *, add_generation_prompt: bool = True, **options: Unpack[PromptOptions]
    ) -> str:
        """Return the prompt that `chat` makes of ``messages``, as text.

        ``tools`` and ``chat_template_kwargs`` are those of `chat`. ``add_generation_prompt``: open the assistant's turn
        at the end.
        """
        fields, local = chat_fields_of(options, PromptOptions), self._use().local
        return await self._run(local.apply_chat_template(messages, fields, begins_reply=add_generation_prompt))


def _texts_of(data: str | Sequence[str]) -> list[str]:
    """Return the texts: ``data`` may be one, or a list of them. Raises RequestError."""
    texts = [data] if isinstance(data, str) or not isinstance(data, Iterable) else list(data)
    for text in texts:
        check_text(text)
    return texts
