"""The context in which a body is validated: the model that its name means, its limits, the client."""

import time
from dataclasses import dataclass
from typing import Protocol

from caravan_dialects.api.errors import UnknownModelError
from caravan_dialects.api.generation.rules import embedding_model_error
from caravan_dialects.api.generation.schema import ServingFields
from caravan_dialects.api.generation.serving import Sender, Serving, serving_of
from caravan_dialects.api.limits import Bounds, Limits
from caravan_dialects.chat.template_renderer import TemplateRenderer
from caravan_dialects.media.decoder import MediaDecoder
from caravan_dialects.media.file import MediaFile, MediaFileError
from caravan_dialects.tool_servers import NO_TOOL_SERVERS, ToolServers
from caravan_scheduler.core.engine import Engine, Fleet, ModelFacts, TextEngine
from caravan_scheduler.core.media import Embeddings, Media, Picture, Sound
from caravan_scheduler.core.request_metrics import RequestMetrics

MODEL_HEADER = "X-Model"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model and the metrics of its requests."""

    engine: Engine
    metrics: RequestMetrics


def model_name(fleet: Fleet, asked: str) -> str:
    """Return the name of the model that ``asked`` means: its own, an alias or an adapter's; "" means the default.

    If the fleet is not strict, its one model answers to every name. Returns "" for the default while that is not known
    yet. Raises UnknownModelError.
    """
    engines, expected = fleet.engines, fleet.names.expected
    names = [engine.model.name for engine in engines]
    asked = fleet.names.meant(asked)
    if asked in names or asked in expected:
        return asked
    for engine in engines:
        if asked in (*engine.model.adapters, *engine.model.aliases):
            return engine.model.name
    if asked and (fleet.names.strict or asked in fleet.names.unloaded):
        raise UnknownModelError(asked)
    return (*expected, *names, "")[0]


# In the metric of decoded files.
_KINDS = {Picture: "picture", Sound: "sound", Embeddings: "embeddings"}


class Decoding(Protocol):
    """Makes media of files."""

    async def decode(self, file: MediaFile) -> Media:
        """Return what ``file`` has. Raises MediaFileError."""
        ...


@dataclass(frozen=True, slots=True)
class CountedDecoding:
    """Decodes for requests of one model and one ``owner``, the name of an API key."""

    decoder: MediaDecoder
    metrics: RequestMetrics
    owner: str

    async def decode(self, file: MediaFile) -> Media:
        """Return what ``file`` has. Raises MediaFileError."""
        began = time.monotonic()
        try:
            medium = await self.decoder.decode(file, self.owner)
        except MediaFileError as error:
            self.metrics.media_refused(error.reason.value)
            raise
        self.metrics.media_decoded(_KINDS[type(medium)], time.monotonic() - began)
        return medium


class PromptContext(Protocol):
    """The part of `Context` that makes a prompt of messages."""

    @property
    def limits(self) -> Limits: ...

    @property
    def templates(self) -> TemplateRenderer: ...

    @property
    def decoding(self) -> Decoding: ...

    @property
    def model(self) -> ModelFacts: ...

    @property
    def bounds(self) -> Bounds: ...

    @property
    def engine(self) -> TextEngine: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The data that validation needs besides the body.

    ``model`` has the facts of the model that the request is for. ``adapter``: the adapter that it names in place of the
    model, "" for none.
    """

    sender: Sender
    limits: Limits
    templates: TemplateRenderer
    decoding: Decoding
    served: ServedModel
    model: ModelFacts
    adapter: str
    bounds: Bounds
    tool_servers: ToolServers = NO_TOOL_SERVERS

    @property
    def engine(self) -> Engine:
        return self.served.engine

    @property
    def adapter_key(self) -> str:
        """The key of the adapter, "" for none."""
        return self.model.adapter_key(self.adapter)

    def check_generates(self) -> None:
        """Raise ValidationError if the model only embeds texts."""
        if not self.model.generates:
            raise embedding_model_error(self.model.name, ranks=self.model.ranks)

    def serving(self, fields: ServingFields) -> Serving:
        """Return how a body with ``fields`` is served. Raises ValidationError."""
        return serving_of(fields, self.sender, self.limits)
