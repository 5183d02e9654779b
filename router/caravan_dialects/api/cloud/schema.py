"""The body and the reply of ``/vertex``."""

from typing import Annotated

import msgspec

# Instances are raw JSON here: msgspec cannot choose between two struct types by their fields.
Instance = Annotated[
    msgspec.Raw,
    msgspec.Meta(
        description="A conversation if it has `messages`, else a prompt.",
        extra_json_schema={
            "anyOf": [
                {"$ref": "#/components/schemas/GenerateRequest"},
                {"$ref": "#/components/schemas/ChatRequest"},
            ]
        },
    ),
]


class VertexRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    instances: list[Instance]


class VertexResponse(msgspec.Struct, frozen=True):
    """One text per instance, in order. A conversation that ends in tool calls yields these as JSON text."""

    predictions: list[str]


class RequestKeys(msgspec.Struct, frozen=True):
    """The fields that distinguish the types of request."""

    inputs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
