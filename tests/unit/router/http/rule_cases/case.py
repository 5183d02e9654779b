"""The form of the cases: a request that breaks one rule, and the error that its client gets."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from caravan_dialects.api.errors import ValidationError
from caravan_dialects.api.limits import Limits
from caravan_scheduler.core.engine import ModelFacts
from caravan_testing.scripted_engine import MODEL

ROLES_MODEL = replace(MODEL, chat_template="{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
DEFAULT_LIMITS = Limits()

GENERATE, STREAM, ROOT, TEXT = "/generate", "/generate_stream", "/", "/v1/completions"
CHAT, VECTORS, VERTEX = "/v1/chat/completions", "/v1/embeddings", "/vertex"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
LLAMA, INFILL = "/completion", "/infill"
OLLAMA, SCORE, RESPONSES, DECISIONS = "/api/generate", "/v1/score", "/v1/responses", "/v1/decisions"
MINIMAL: dict[str, dict[str, Any]] = {
    GENERATE: {"inputs": "hi"},
    STREAM: {"inputs": "hi"},
    ROOT: {"inputs": "hi"},
    TOKENIZE: {"inputs": "hi"},
    TEXT: {"prompt": "hi"},
    LLAMA: {"prompt": "hi"},
    INFILL: {"input_prefix": "a", "input_suffix": "b"},
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    VECTORS: {"input": "hi"},
    RESPONSES: {"input": "hi"},
    DECISIONS: {"input": "hi", "questions": [{"type": "predicate", "instructions": "it is so"}]},
    VERTEX: {"instances": [{"inputs": "hi"}]},
    OLLAMA: {"model": "any", "prompt": "hi"},
}


@dataclass(frozen=True)
class Case:
    """A request that breaks a rule.

    ``rule``: what makes the error. ``body``: fields beyond those that the route requires. ``param``: the field's name
    in OpenAI's errors.
    """

    rule: Callable[..., ValidationError]
    path: str
    body: dict[str, Any]
    param: str | None
    message: str
    limits: Limits = DEFAULT_LIMITS
    model: ModelFacts = ROLES_MODEL
    header: tuple[str, str] = ("X-Request-Id", "a")
    method: str = "POST"


def tgi(**parameters: Any) -> dict[str, Any]:
    return {"parameters": parameters}


def chat(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"messages": list(messages)}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def nested(levels: int) -> dict[str, Any]:
    return {"a": nested(levels - 1)} if levels else {}
