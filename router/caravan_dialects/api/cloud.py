"""``/vertex``, the API that Vertex AI calls, over the other dialects: one text for each instance."""

from collections.abc import Sequence
from typing import Annotated

import msgspec

from caravan_dialects.api.body import decode
from caravan_dialects.api.generation.asked import Answer, Asked
from caravan_dialects.api.generation.context import Context
from caravan_dialects.api.generation.reading import BodyReader
from caravan_dialects.api.generation.rules import empty_prompt_error, too_many_prompts_error, unsupported_field_error
from caravan_dialects.api.generation.run import Run, together
from caravan_dialects.api.limits import Limits
from caravan_dialects.api.openai.chat.reply import AskedChat, ChatAnswer
from caravan_dialects.api.openai.chat.schema import ChatRequest
from caravan_dialects.api.tgi.errors import TGI
from caravan_dialects.api.tgi.reply import AskedGenerate, GenerateAnswer
from caravan_dialects.api.tgi.schema import CompatGenerateRequest

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
_GENERATE = BodyReader(CompatGenerateRequest)
_CHAT = BodyReader(ChatRequest)


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


_KEYS = msgspec.json.Decoder(RequestKeys)


class AskedVertex(Asked):
    """A text for each instance."""

    dialect = TGI

    def __init__(self, body: VertexRequest, limits: Limits) -> None:
        """Raises ValidationError."""
        # The paths of fields that were ignored.
        self.ignored: list[str] = []
        self._instances = _instances(body, limits, self.ignored)
        self.generations = sum(instance.generations for instance in self._instances)
        self.model = self._instances[0].model

    async def validate(self, context: Context) -> "VertexAnswer":
        return VertexAnswer([await instance.validate(context) for instance in self._instances])


class VertexAnswer(Answer):
    """One text for each instance. All instances are generated at the same time."""

    def __init__(self, answers: Sequence[GenerateAnswer | ChatAnswer]) -> None:
        super().__init__([request for answer in answers for request in answer.requests])
        self._answers = answers

    async def whole(self, runs: Sequence[Run]) -> bytes:
        texts, start = [], 0
        for answer in self._answers:
            end = start + sum(len(request.specs) for request in answer.requests)
            texts.append(answer.text(runs[start:end]))
            start = end
        predictions = await together(texts)
        if cut := [run.cut for run in runs if run.cut is not None]:
            # A prediction has no field that could say that it is incomplete.
            raise cut[0]
        return msgspec.json.encode(VertexResponse(predictions))


def _instances(body: VertexRequest, limits: Limits, ignored: list[str]) -> list[AskedGenerate | AskedChat]:
    """Read the instances, and add the paths of fields that do not count to ``ignored``. Raises ValidationError."""
    if not body.instances:
        raise empty_prompt_error("instances")
    if len(body.instances) > limits.max_client_batch_size:
        raise too_many_prompts_error("instances", limits.max_client_batch_size, len(body.instances))
    instances: list[AskedGenerate | AskedChat] = []
    for index, raw in enumerate(body.instances):
        inside = f"instances[{index}]"
        if decode(raw, _KEYS, inside).messages is msgspec.UNSET:
            generate, unknown = _GENERATE.read(raw, exact=limits.strict_fields, inside=inside)
            _check_one_text(inside, generate.stream, None)
            instances.append(AskedGenerate(generate, limits, streamed=False))
        else:
            chat, unknown = _CHAT.read(raw, exact=limits.strict_fields, inside=inside)
            _check_one_text(inside, chat.stream, chat.n)
            instances.append(AskedChat(chat, limits))
        ignored += unknown
        _check_same_model(inside, instances)
    return instances


def _check_one_text(inside: str, stream: bool | None, n: int | None) -> None:
    """A prediction is one text."""
    for field, value, neutral in (("stream", stream, {None, False}), ("n", n, {None, 1})):
        if value not in neutral:
            raise unsupported_field_error(f"{inside}.{field}", "set it to null", value)


def _check_same_model(inside: str, instances: Sequence[AskedGenerate | AskedChat]) -> None:
    """Require that the last of ``instances`` is for the model that the first is for."""
    if instances[-1].model != instances[0].model:
        raise unsupported_field_error(f"{inside}.model", "let all instances have the same", instances[-1].model)
