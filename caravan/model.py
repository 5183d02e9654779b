"""What generates: a model of this process, or one on a server."""

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol

from caravan.chat_call import ChatCall, Messages
from caravan.outputs import RequestOutput
from caravan.prompts import PlainPrompt
from caravan.sampling_params import SamplingParams

OnOutput = Callable[[RequestOutput], None]


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
