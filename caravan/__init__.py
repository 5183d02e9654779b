"""Caravan in a program of one's own: a model in this process, without HTTP and gRPC. Sits above router and shard."""

from caravan.async_llm import AsyncLLM
from caravan.errors import (
    CaravanError,
    ClosedError,
    DeadlineError,
    GenerationError,
    ModelError,
    RequestError,
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
from caravan.sampling_params import SamplingParams, StructuredOutputsParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "CaravanError",
    "ClosedError",
    "CompletionOutput",
    "DeadlineError",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "GenerationError",
    "Logprob",
    "ModelError",
    "ModelOptions",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "ToolCall",
]
