"""Bodies of what Vertex AI sends."""

import msgspec

from caravan_router.http.schema_tgi import GenerateRequest


class VertexRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    instances: list[GenerateRequest]


class VertexResponse(msgspec.Struct, frozen=True):
    """A text for each instance, in their order."""

    predictions: list[str]
