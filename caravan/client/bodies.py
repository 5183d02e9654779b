"""Turns calls of a client into request bodies."""

import base64
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, assert_never

from caravan.client.outputs import ConversationExport, Delete, Insert, Item, Operation, Replace
from caravan.errors import RequestError
from caravan.options import check_names
from caravan.prompts import ChatCall, Messages, PlainPrompt
from caravan.request_fields import FUNCTIONS, chat_fields, completion_fields, sampling_fields
from caravan.sampling_params import SamplingParams
from caravan_dialects.api.openai.responses.schema import ResponseRequest

Input = str | Sequence[Item]

# The route ignores fields that it does not know.
_RESPONSE_FIELDS = frozenset(ResponseRequest.__struct_fields__)


class RespondOptions(TypedDict, total=False):
    """Options of a response that are no sampling parameters.

    ``instructions``: a system message for this response alone. ``tools``, ``tool_choice``, ``parallel_tool_calls``:
    those of OpenAI's responses. ``schema``: a JSON schema that the answer matches, as an object, as text or as a
    pydantic class. ``truncation``: "auto" leaves out the oldest turns if not all fit. ``reasoning_effort``: "none",
    "minimal", "low", "medium", "high", "xhigh" or "max". ``reasoning_budget_tokens``: maximum tokens of reasoning.
    ``metadata``: kept with the response. ``model``: the name of a model or of an adapter.
    """

    instructions: str
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    schema: Any
    truncation: Literal["auto", "disabled"]
    reasoning_effort: str
    reasoning_budget_tokens: int
    metadata: Mapping[str, str]
    model: str


def completion(prompt: PlainPrompt, params: SamplingParams, model: str, *, stream: bool) -> dict[str, Any]:
    """Return the body of a completion. Raises RequestError."""
    if params.max_tokens is None:
        raise RequestError("`max_tokens` must be a number here: a server's completions have no word for all that fit")
    fields = completion_fields(prompt, params)
    if not isinstance(prompt, str | Sequence):
        # Only a program that has made embeddings needs what makes a file of them.
        from caravan.media import npy_of

        fields["prompt_embeds"] = base64.b64encode(npy_of(prompt)).decode()
    return _generating(fields, params, model, stream=stream)


def chat(messages: Messages, params: SamplingParams, call: ChatCall, model: str, *, stream: bool) -> dict[str, Any]:
    """Return the body of a chat completion. Raises RequestError."""
    return _generating(chat_fields(messages, params, call.fields), params, model, stream=stream)


def _refuse_functions(params: SamplingParams) -> None:
    for name in sorted(FUNCTIONS):
        if getattr(params, name):
            raise RequestError(f"`{name}` are functions of this program, which a server cannot call: use `LLM`")


def _generating(fields: dict[str, Any], params: SamplingParams, model: str, *, stream: bool) -> dict[str, Any]:
    _refuse_functions(params)
    if params.logprobs:
        raise RequestError("`logprobs` must be 0 or None here: a server names the alternatives of a token by text only")
    body = fields | {"return_token_ids": True, "model": model or None}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return {name: value for name, value in body.items() if value is not None}


def response(
    conversation: str, given: Input, params: SamplingParams, options: RespondOptions, *, stream: bool
) -> dict[str, Any]:
    """Return the body of a response that extends a conversation.

    Raises RequestError for parameters that responses do not have, and TypeError for unknown options.
    """
    check_names(options, RespondOptions.__annotations__)
    _refuse_functions(params)
    fields = sampling_fields(params)
    structure = fields.pop("structured_outputs", {})
    refused = sorted(fields.keys() - _RESPONSE_FIELDS)
    refused += [f"structured_outputs.{name}" for name in sorted(structure.keys() - {"json", "json_object"})]
    refused += [name for name in ("logprobs", "prompt_logprobs", "logit_bias") if getattr(params, name) is not None]
    if refused:
        raise RequestError(f"responses do not have these parameters: {', '.join(dict.fromkeys(refused))}")
    plain: dict[str, Any] = dict(options)
    schema, effort = plain.pop("schema", None), plain.pop("reasoning_effort", None)
    body = (
        fields
        | plain
        | {
            "conversation": conversation,
            "input": given if isinstance(given, str) else list(given),
            "max_output_tokens": params.max_tokens,
            "text": _format(schema, structure),
            "reasoning": None if effort is None else {"effort": effort},
            "stream": stream or None,
        }
    )
    return {name: value for name, value in body.items() if value is not None}


def _format(schema: Any, structure: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the field ``text``; None if any text will do. Raises RequestError."""
    if schema is not None and structure:
        raise RequestError("`schema` and `structured_outputs` cannot be combined")
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    if schema is None:
        schema = structure.get("json")
    if schema is not None:
        return {"format": {"type": "json_schema", "name": "schema", "schema": schema}}
    return {"format": {"type": "json_object"}} if structure.get("json_object") else None


def imported(export: ConversationExport, metadata: Mapping[str, str] | None) -> dict[str, Any]:
    """Return the body that makes a conversation of an export."""
    tokens = None
    if export.fingerprint:
        tokens = {"fingerprint": export.fingerprint, "token_ids": list(export.token_ids)}
    entries = {"items": list(export.items), "metadata": dict(export.metadata), "tokens": tokens}
    return {"import": entries, "metadata": None if metadata is None else dict(metadata)}


def edit(operations: Sequence[Operation]) -> dict[str, Any]:
    """Return the body of an edit."""
    return {"operations": [_operation(operation) for operation in operations]}


def _operation(operation: Operation) -> dict[str, Any]:
    match operation:
        case Insert(items=items, after=after):
            return {"op": "insert", "after": after, "items": list(items)}
        case Replace(item=item, items=items):
            return {"op": "replace", "item": item, "items": list(items)}
        case Delete(item=item):
            return {"op": "delete", "item": item}
        case _:
            assert_never(operation)
