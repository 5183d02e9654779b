"""Caravan in a program of one's own: a model in this process, without HTTP and gRPC. Sits above router and shard."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from caravan.async_llm import AsyncLLM
from caravan.errors import (
    AlreadyPrompted,
    CacheFull,
    CaravanError,
    ClosedError,
    ConversationEnded,
    ConversationError,
    DeadlineError,
    GenerationError,
    ModelError,
    NeedsInfer,
    NeedsPrompt,
    RequestError,
    StateError,
    TooLong,
    WrongThreadError,
)
from caravan.llm import LLM
from caravan.options import ModelOptions
from caravan.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    ToolCall,
)
from caravan.prompts import TextPrompt, TokensPrompt
from caravan.sampling_params import ChoiceParameters, SamplingParams, StructuredOutputsParams
from caravan.token import Token

if TYPE_CHECKING:
    from caravan.async_executor import AsyncConversation, AsyncExecutor
    from caravan.client import AsyncClient, Client
    from caravan.conversation import Conversation, State
    from caravan.executor import Executor, Inference

__all__ = [
    "LLM",
    "AlreadyPrompted",
    "AsyncClient",
    "AsyncConversation",
    "AsyncExecutor",
    "AsyncLLM",
    "CacheFull",
    "CaravanError",
    "ChoiceParameters",
    "Client",
    "ClosedError",
    "CompletionOutput",
    "Conversation",
    "ConversationEnded",
    "ConversationError",
    "DeadlineError",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "Executor",
    "GenerationError",
    "Inference",
    "Logprob",
    "ModelError",
    "ModelOptions",
    "NeedsInfer",
    "NeedsPrompt",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "State",
    "StateError",
    "StructuredOutputsParams",
    "TextPrompt",
    "Token",
    "TokensPrompt",
    "TooLong",
    "ToolCall",
    "WrongThreadError",
]

# They need packages that importing this one does not load: those of the shard, and those of HTTP.
_LATER = {
    "AsyncClient": "caravan.client",
    "AsyncConversation": "caravan.async_executor",
    "AsyncExecutor": "caravan.async_executor",
    "Client": "caravan.client",
    "Conversation": "caravan.conversation",
    "Executor": "caravan.executor",
    "Inference": "caravan.executor",
    "State": "caravan.conversation",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'caravan' has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)
