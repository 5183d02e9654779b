"""Anthropic's cache diagnostics: which change of a request kept its prompt from beginning as the one before it."""

import msgspec

from caravan_dialects.api.anthropic.schema import Block, CacheMissReason, Diagnostics, MessagesRequest
from caravan_dialects.api.anthropic.turns import system_text
from caravan_dialects.api.generation.comparison import Fingerprint, RememberedRequests, divergence, fingerprint_of
from caravan_dialects.api.generation.context import Context

_TYPES = {
    "model": "model_changed",
    "system": "system_changed",
    "tools": "tools_changed",
    "messages": "messages_changed",
}


def diagnosed(
    remembered: RememberedRequests, context: Context, body: MessagesRequest, message_id: str, prompt: tuple[int, ...]
) -> Diagnostics | msgspec.UnsetType | None:
    """Return the ``diagnostics`` of the reply with ``message_id``, and remember the request if it asks for them."""
    asked = body.diagnostics
    if asked is None:
        return msgspec.UNSET
    owner = context.sender.key.tenant.name
    now = _fingerprint(context, body, prompt)
    remembered.remember(owner, message_id, now)
    if asked.previous_message_id is None:
        return None
    before = remembered.find(owner, asked.previous_message_id)
    if before is None:
        return Diagnostics(CacheMissReason(type="previous_message_not_found"))
    found = divergence(before, now)
    if found is None:
        return None
    kind = _TYPES.get(found.part)
    if kind is None:
        return Diagnostics(CacheMissReason(type="unavailable", first_difference=found.at))
    return Diagnostics(CacheMissReason(type=kind, cache_missed_input_tokens=found.earlier, first_difference=found.at))


def _fingerprint(context: Context, body: MessagesRequest, prompt: tuple[int, ...]) -> Fingerprint:
    parts = {
        "model": [context.model.name, context.adapter_key, context.model.fingerprint],
        "system": system_text(body),
        "tools": [msgspec.structs.replace(tool, cache_control=None) for tool in body.tools or ()],
        "salt": body.cache_salt,
        "others": [body.tool_choice, body.thinking, body.output_config, body.output_format],
    }
    messages = ([message.role, _blocks(message.content)] for message in body.messages)
    return fingerprint_of(parts, messages, prompt)


def _blocks(content: str | list[Block]) -> list[Block]:
    """Return ``content`` as blocks, since clients change between both forms, without what marks the ends of caches."""
    if isinstance(content, str):
        return [Block(type="text", text=content)]
    return [
        msgspec.structs.replace(
            block,
            cache_control=None,
            content=_blocks(block.content) if isinstance(block.content, list) else block.content,
        )
        for block in content
    ]
