"""Caravan in your program: a model in its process, without HTTP and gRPC. Sits above router and shard."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from caravan.chat_session import AsyncChatSession, ChatSession
from caravan.engine import AsyncLLMEngine, EngineArgs, LLMEngine
from caravan.errors import (
    AlreadyPrompted,
    CacheFull,
    CaravanError,
    ClosedError,
    ContextLengthError,
    ConversationEnded,
    ConversationError,
    DeadlineError,
    ForkedError,
    GenerationError,
    LogitsProcessorError,
    ModelError,
    NeedsInfer,
    NeedsPrompt,
    ReplyUnderWay,
    RequestError,
    ServerError,
    StateError,
    TooLong,
    WrongThreadError,
)
from caravan.llm import LLM, AsyncLLM
from caravan.options import ModelOptions, ServerOptions
from caravan.outputs import (
    ChatPart,
    ChatReply,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    Token,
    ToolCall,
)
from caravan.prompts import EmbedsPrompt, TextPrompt, TokensPrompt
from caravan.sampling_params import ChoiceParameters, SamplingParams, StructuredOutputsParams
from caravan.server import AsyncServer, Server

if TYPE_CHECKING:
    from caravan.async_executor import AsyncConversation, AsyncExecutor
    from caravan.client import AsyncClient, Client
    from caravan.conversation import Conversation, Inference, State
    from caravan.embeddings import Embeddings
    from caravan.executor import Executor
    from caravan.media import Picture, PlacedMedia, Sound
    from caravan_proto import __version__

__all__ = [
    "LLM",
    "AlreadyPrompted",
    "AsyncChatSession",
    "AsyncClient",
    "AsyncConversation",
    "AsyncExecutor",
    "AsyncLLM",
    "AsyncLLMEngine",
    "AsyncServer",
    "CacheFull",
    "CaravanError",
    "ChatPart",
    "ChatReply",
    "ChatSession",
    "ChoiceParameters",
    "Client",
    "ClosedError",
    "CompletionOutput",
    "ContextLengthError",
    "Conversation",
    "ConversationEnded",
    "ConversationError",
    "DeadlineError",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "Embeddings",
    "EmbedsPrompt",
    "EngineArgs",
    "Executor",
    "ForkedError",
    "GenerationError",
    "Inference",
    "LLMEngine",
    "LogitsProcessorError",
    "Logprob",
    "ModelError",
    "ModelOptions",
    "NeedsInfer",
    "NeedsPrompt",
    "Picture",
    "PlacedMedia",
    "ReplyUnderWay",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "Server",
    "ServerError",
    "ServerOptions",
    "Sound",
    "State",
    "StateError",
    "StructuredOutputsParams",
    "TextPrompt",
    "Token",
    "TokensPrompt",
    "TooLong",
    "ToolCall",
    "WrongThreadError",
    "__version__",
]

# They need packages that importing this one does not load: those of the shard, and those of HTTP.
_LATER = {
    "AsyncClient": "caravan.client",
    "AsyncConversation": "caravan.async_executor",
    "AsyncExecutor": "caravan.async_executor",
    "Client": "caravan.client",
    "Conversation": "caravan.conversation",
    "Embeddings": "caravan.embeddings",
    "Executor": "caravan.executor",
    "Inference": "caravan.conversation",
    "Picture": "caravan.media",
    "PlacedMedia": "caravan.media",
    "Sound": "caravan.media",
    "State": "caravan.conversation",
    "__version__": "caravan_proto",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'caravan' has no attribute {name!r}")
    try:
        module = import_module(_LATER[name])
    except ModuleNotFoundError as missing:
        from caravan_proto.packages import Part, import_error

        raise import_error(f"caravan.{name}", Part.LIBRARY, missing) from None
    return getattr(module, name)
