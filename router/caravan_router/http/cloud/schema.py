"""Bodies of what Vertex AI sends."""

from typing import Annotated

import msgspec

# Told apart by their fields, which JSON types alone cannot be.
Instance = Annotated[
    msgspec.Raw,
    msgspec.Meta(
        description="With `messages` a conversation, else a prompt.",
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
    """A text for each instance, in their order; of a conversation that ends in calls of tools, these as JSON text."""

    predictions: list[str]
