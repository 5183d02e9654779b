"""The context in which a body is validated: the model, its limits, the client."""

from dataclasses import dataclass
from typing import Protocol

from caravan_dialects.api.generation.bounds import Bounds
from caravan_dialects.api.generation.decoding import Decoding
from caravan_dialects.api.generation.models import ServedModel
from caravan_dialects.api.generation.rules import embedding_model_error
from caravan_dialects.api.generation.schema import ServingFields
from caravan_dialects.api.generation.serving import Sender, Serving, serving_of
from caravan_dialects.api.limits import Limits
from caravan_dialects.chat.template_renderer import TemplateRenderer
from caravan_scheduler.core.engine import Engine, ModelFacts, TextEngine


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

    @property
    def engine(self) -> Engine:
        return self.served.engine

    def check_generates(self) -> None:
        """Raise ValidationError if the model only embeds texts."""
        if not self.model.generates:
            raise embedding_model_error(self.model.name, ranks=self.model.ranks)

    def serving(self, fields: ServingFields) -> Serving:
        """Return how a body with ``fields`` is served. Raises ValidationError."""
        return serving_of(fields, self.sender, self.limits)
