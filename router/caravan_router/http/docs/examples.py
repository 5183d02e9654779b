"""An example of each operation, which openapi.json has, `/docs` sends, and a test sends to a running server."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Readers of the page choose another one; a server of one model answers to every name.
MODEL = "smollm2:135m"
# The `X-Request-Id` of what the page sends, so that its requests can be aborted.
REQUEST_ID = "docs"

_ASKED = "Why is the sky blue? Answer in one sentence."
_TOKENS = 48
_CHAT = {"model": MODEL, "messages": [{"role": "user", "content": _ASKED}]}
_SKY = {"contents": [{"role": "user", "parts": [{"text": _ASKED}]}]}
_EMBEDDED = {"content": {"parts": [{"text": "The sky is blue."}]}}
_RANKED = {
    "model": MODEL,
    "query": "Which animals can fly?",
    "documents": ["Bats fly at night.", "Whales live in the sea.", "Swifts sleep in the air."],
}
_ITEM = {"type": "message", "role": "user", "content": "The capital of France is Paris."}
_GENERATED = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": _TOKENS}}
_LLAMA_PROMPT = {"prompt": "The capital of France is", "n_predict": _TOKENS}

_VECTORS = "Needs a server that was started with `--embeddings`."
_CATALOGUE = "Needs models that are loaded on demand, see `--models-dir`."
_ADAPTERS = "Needs shards with `--lora-dir`, and the file in it."
_STOCK = "Needs `--models-hub` of `caravan serve`."
_AUDIO = "Needs a model that reads audio. Without a file, the page sends a second of a tone."


@dataclass(frozen=True, slots=True)
class Source:
    """``pointer``: where the value is in the reply to the first example of ``operation``, such as "/data/0/id"."""

    operation: str
    pointer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """``bodies``: by their names. ``form``: the fields of a form, without its file. ``values``: of parameters.

    ``sources``: of parameters whose values other operations return. ``needs``: what not every server has.
    """

    bodies: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    form: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, str] = field(default_factory=dict)
    sources: Mapping[str, Source] = field(default_factory=dict)
    needs: str = ""


def _of(body: Mapping[str, Any], needs: str = "") -> Example:
    return Example(bodies={"Example": body}, needs=needs)


def _streamed(body: Mapping[str, Any], needs: str = "") -> Example:
    """Return the example of an operation that streams if it is asked to."""
    return Example(bodies={"Whole": {**body, "stream": False}, "Streamed": {**body, "stream": True}}, needs=needs)


def _in_conversation(body: Mapping[str, Any] | None = None, **sources: Source) -> Example:
    return Example(
        bodies={} if body is None else {"Example": body},
        sources={"conversation_id": Source("create_conversation", "/id"), **sources},
    )


def _gemini(body: Mapping[str, Any], needs: str = "", **values: str) -> Example:
    return Example(bodies={"Example": body}, values={"model": MODEL, **values}, needs=needs)


_COUNTED = _of(_CHAT)
_CHATTED = {**_CHAT, "max_tokens": _TOKENS}
_FIRST_ITEM = Source("list_items", "/data/0/id")
_OF_RESPONSE = {"response_id": Source("create_response", "/id")}
_OF_PREFIX = Example(sources={"prefix": Source("pin_prompt", "/id")})
_NONE = Example()

# By the names of the functions that answer.
_FILE = Example(sources={"file_id": Source("upload_file", "/id")})
_MESSAGE = {"model": MODEL, "max_tokens": _TOKENS, "messages": [{"role": "user", "content": _ASKED}]}
_MESSAGE_BATCH = Example(sources={"batch_id": Source("create_message_batch", "/id")})
_UPLOADED = "Needs the id of a file of requests that was uploaded, or of a batch that was made of it."
_ENDED = "Needs the id of a batch that has ended."

EXAMPLES: Mapping[str, Example] = {
    # OpenAI
    "chat_completions": _streamed(_CHATTED),
    "chat_input_tokens": _COUNTED,
    "render_chat": _COUNTED,
    "apply_template": _COUNTED,
    "chat_tokenize": _COUNTED,
    "control": _of(
        {"id": REQUEST_ID, "action": "reasoning_end"}, "Ends the reasoning of a chat that this page has in progress."
    ),
    "completions": _streamed({"model": MODEL, "prompt": "The capital of France is", "max_tokens": _TOKENS}),
    "render_completion": _of({"model": MODEL, "prompt": "The capital of France is"}),
    "generate_tokens": _streamed({"model": MODEL, "token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 16}}),
    "embeddings": _of({"model": MODEL, "input": ["The sky is blue.", "Grass is green."]}, _VECTORS),
    "rerank": _of(_RANKED, _VECTORS),
    "score": _of({"model": MODEL, "text_1": "The sky is blue.", "text_2": ["Air scatters light."]}, _VECTORS),
    "decisions": _of(
        {
            "model": MODEL,
            "input": "The parcel arrived broken. I want my money back.",
            "questions": [
                {"type": "predicate", "instructions": "The customer is angry."},
                {
                    "type": "choice",
                    "instructions": "What is it about?",
                    "choices": [{"value": "delivery"}, {"value": "billing"}],
                },
            ],
        }
    ),
    "transcriptions": Example(form={"model": MODEL, "max_tokens": "48"}, needs=_AUDIO),
    "translations": Example(form={"model": MODEL, "max_tokens": "48"}, needs=_AUDIO),
    "models": _NONE,
    "model": Example(values={"model": MODEL}),
    "requests": _NONE,
    "abort_request": Example(
        values={"id": REQUEST_ID}, needs="Aborts what this page generates meanwhile; 404 if that is nothing."
    ),
    # Files and batches
    "upload_file": Example(form={"purpose": "user_data"}),
    "list_files": Example(),
    "get_file": _FILE,
    "get_content": _FILE,
    "delete_file": _FILE,
    "create_batch": _of(
        {"input_file_id": "file_1", "endpoint": "/v1/chat/completions", "completion_window": "24h"}, _UPLOADED
    ),
    "list_batches": Example(),
    "get_batch": Example(values={"batch_id": "batch_1"}, needs=_UPLOADED),
    "cancel_batch": Example(values={"batch_id": "batch_1"}, needs=_UPLOADED),
    "create_message_batch": _of({"requests": [{"custom_id": "1", "params": _MESSAGE}]}),
    "list_message_batches": Example(),
    "get_message_batch": _MESSAGE_BATCH,
    "cancel_message_batch": _MESSAGE_BATCH,
    "delete_message_batch": Example(values={"batch_id": "msgbatch_1"}, needs=_ENDED),
    "get_results": Example(values={"batch_id": "msgbatch_1"}, needs=_ENDED),
    # OpenAI's responses and conversations
    "create_response": _streamed({"model": MODEL, "input": _ASKED, "max_output_tokens": _TOKENS}),
    "count_input_tokens": _of({"model": MODEL, "input": _ASKED}),
    "render_response": _of({"model": MODEL, "input": _ASKED}),
    "get_response": Example(sources=_OF_RESPONSE),
    "delete_response": Example(sources=_OF_RESPONSE),
    "cancel_response": Example(
        values={"response_id": "resp_0123456789abcdef"},
        needs="Needs a response that is streamed meanwhile, whose id is in its first event.",
    ),
    "list_input_items": Example(sources=_OF_RESPONSE),
    "create_conversation": _of({"items": [_ITEM], "metadata": {"topic": "geography"}}),
    "get_conversation": _in_conversation(),
    "update_conversation": _in_conversation({"metadata": {"topic": "capitals"}}),
    "delete_conversation": _in_conversation(),
    "list_items": _in_conversation(),
    "create_items": _in_conversation({"items": [{**_ITEM, "content": "And that of Italy is Rome."}]}),
    "get_item": _in_conversation(item_id=_FIRST_ITEM),
    "delete_item": _in_conversation(item_id=_FIRST_ITEM),
    "fork_conversation": _in_conversation({"metadata": {"topic": "a fork"}}),
    "rewind_conversation": _in_conversation({"turns": 1}),
    "shift_conversation": _in_conversation({"drop": 1}),
    "edit_conversation": _in_conversation({"operations": [{"op": "insert", "items": [_ITEM]}]}),
    "export_conversation": _in_conversation(),
    # Anthropic
    "messages": _streamed(_CHATTED),
    "count_tokens": _COUNTED,
    "render_message": _COUNTED,
    # Gemini
    "generate_content": _gemini({**_SKY, "generationConfig": {"maxOutputTokens": _TOKENS}}),
    "stream_generate_content": _gemini({**_SKY, "generationConfig": {"maxOutputTokens": _TOKENS}}, alt="sse"),
    "count_content_tokens": _gemini(_SKY),
    "embed_content": _gemini(_EMBEDDED, _VECTORS),
    "batch_embed_contents": _gemini({"requests": [_EMBEDDED, _EMBEDDED]}, _VECTORS),
    "gemini_models": _NONE,
    "gemini_model": Example(values={"model": MODEL}),
    # Ollama
    "ollama_chat": _streamed({**_CHAT, "options": {"num_predict": _TOKENS}}),
    "ollama_generate": _streamed({"model": MODEL, "prompt": _ASKED, "options": {"num_predict": _TOKENS}}),
    "ollama_embed": _of({"model": MODEL, "input": ["The sky is blue."]}, _VECTORS),
    "ollama_embeddings": _of({"model": MODEL, "prompt": "The sky is blue."}, _VECTORS),
    "ollama_show": _of({"model": MODEL}),
    "ollama_tags": _NONE,
    "ollama_ps": _NONE,
    "ollama_version": _NONE,
    "pull": _streamed({"model": MODEL}, _STOCK),
    "create": _streamed({"from": MODEL, "model": "poet", "system": "Answer in verse."}, _STOCK),
    "copy": _of({"source": MODEL, "destination": "another-name"}, _STOCK),
    "delete": _of({"model": "another-name"}, _STOCK),
    # TGI
    "generate": _of(_GENERATED),
    "generate_stream": _of(_GENERATED),
    "generate_compat": _streamed(_GENERATED),
    "tokenize": _of({"inputs": "The capital of France is Paris."}),
    "detokenize": _of({"tokens": [40, 41, 42]}),
    "info": _NONE,
    # llama-server
    "llama_completion": _streamed(_LLAMA_PROMPT),
    "infill": _streamed({"input_prefix": "def add(a, b):\n", "input_suffix": "    return total\n", "n_predict": 24}),
    "props": _NONE,
    "slots": _NONE,
    "lora_adapters": _NONE,
    "load": _of({"model": MODEL}, _CATALOGUE),
    "unload": _of({"model": MODEL}, _CATALOGUE),
    "model_changes": Example(needs=f"{_CATALOGUE} The stream has no end."),
    # SageMaker and Vertex AI
    "invocations": _streamed(_CHATTED),
    "vertex": _of({"instances": [_GENERATED]}),
    # Health, metrics and documents
    "front_page": _NONE,
    "health": _NONE,
    "readyz": _NONE,
    "livez": _NONE,
    "vllm_version": _NONE,
    "server_load": _NONE,
    "is_sleeping": _NONE,
    "metrics": _NONE,
    "openapi": _NONE,
    "docs": _NONE,
    # Operators
    "shards": _NONE,
    "drain": Example(sources={"shard": Source("shards", "/shards/0/address")}, needs="Ends the shard."),
    "prefixes": _NONE,
    "flush_prefixes": _NONE,
    "pin_prompt": _of({"prompt": "You are a helpful assistant that answers in one sentence."}),
    "show_prefix": _OF_PREFIX,
    "pin_prefix": _OF_PREFIX,
    "unpin_prefix": _OF_PREFIX,
    "drop_prefix": _OF_PREFIX,
    "load_lora_adapter": _of({"lora_name": "poet", "lora_path": "poet.gguf"}, _ADAPTERS),
    "unload_lora_adapter": _of({"lora_name": "poet"}, _ADAPTERS),
    "timeline": Example(needs="The stream has no end."),
}
