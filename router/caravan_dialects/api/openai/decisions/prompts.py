"""Makes the prompts of a decision: the input, then one question, then what the template writes before an answer.

These three are tokenized separately, so that all questions have the same tokens before them, and the labels the same
tokens in each question. A model that reasons gets an empty reasoning block: its answer is the next token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from caravan_dialects.api.generation.context import Context
from caravan_dialects.api.generation.parts import MediaParts
from caravan_dialects.api.generation.prompt import check_bytes, fit
from caravan_dialects.api.generation.rules import empty_prompt_error
from caravan_dialects.api.openai.chat.plan import chat_plan_of, chat_prompt_up_to
from caravan_dialects.api.openai.chat.schema import ChatRequest, Message
from caravan_dialects.api.openai.decisions.labels import LabelTokens
from caravan_dialects.api.openai.decisions.questions import (
    MAX_QUESTIONS,
    PROMPT_FORMAT_VERSION,
    Wording,
    json_text,
    worded,
)
from caravan_dialects.api.openai.decisions.rules import (
    format_version_error,
    prompt_tokens_error,
    question_count_error,
)
from caravan_dialects.api.openai.decisions.schema import DecisionRequest
from caravan_dialects.api.openai.responses.item_messages import ItemTexts, messages_of
from caravan_dialects.api.openai.responses.items import check_size, read_items
from caravan_dialects.api.openai.responses.tools import offered_tools
from caravan_dialects.chat.control_text import draw_mark
from caravan_dialects.conversations.nodes import Json
from caravan_scheduler.core.errors import GenerationError
from caravan_scheduler.core.prompt_media import PromptMedia
from caravan_scheduler.core.tokens import common_length

# 400 questions about 40,000 tokens. All prompts are in the router's memory at the same time, at 8 bytes for each token.
_MOST_PROMPT_TOKENS = 1 << 24


@dataclass(frozen=True, slots=True)
class Reading:
    """A question as it is asked once: its place in the request, its prompt, and the tokens of its labels."""

    question: int
    prompt: tuple[int, ...]
    labels: LabelTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """``shared``: number of tokens with which all prompts begin. ``characters``: length of input and questions."""

    readings: Sequence[Reading]
    shared: int
    media: PromptMedia | None
    characters: int


async def readings_of(context: Context, body: DecisionRequest) -> Readings:
    """Return the prompts of all questions.

    Raises ValidationError, ChatTemplateError, NoShardError, TextTooLongError, GenerationError.
    """
    if body.prompt_format_version not in {None, PROMPT_FORMAT_VERSION}:
        raise format_version_error(PROMPT_FORMAT_VERSION, body.prompt_format_version or 0)
    if not 1 <= len(body.questions) <= MAX_QUESTIONS:
        raise question_count_error(MAX_QUESTIONS, len(body.questions))
    asked = [
        (number, worded(f"questions[{number}]", question, backwards=backwards))
        for number, question in enumerate(body.questions)
        for backwards in ((False, True) if body.average_orders else (False,))
    ]
    for number, wording in asked:
        check_bytes(f"questions[{number}]", wording.text, context.bounds)
    media, mark = MediaParts(context.model.media), draw_mark()
    chat = ChatRequest(messages=_messages(body, media, mark), reasoning_effort="none")
    plan = chat_plan_of(context, chat, constrained=False, media=media)
    before, after = await chat_prompt_up_to(context, plan, "input", mark)
    queries = context.engine.queries
    texts = [wording.text for _, wording in asked]
    questions = await queries.tokenize_texts(texts, add_special=False, parse_special=False)
    shared = before.tokens.token_ids
    ending = await _ending(context, after, [wording for _, wording in asked])
    readings = []
    total = 0
    # Most questions have the same labels.
    known: dict[tuple[str, ...], LabelTokens] = {}
    for (number, wording), question in zip(asked, questions, strict=True):
        if (labels := known.get(wording.labels)) is None:
            labels = known[wording.labels] = LabelTokens.of(tuple(ending.labels[label] for label in wording.labels))
            _check_labels(wording, labels)
        total += len(labels.rows) * (len(shared) + len(question) + len(ending.tokens))
        if total > _MOST_PROMPT_TOKENS:
            raise prompt_tokens_error(_MOST_PROMPT_TOKENS, total)
        prompt = (*shared, *question, *ending.tokens)
        fit(prompt, max(map(len, labels.labels)), context.bounds, (f"input and questions[{number}]", "labels"))
        readings.append(Reading(number, prompt, labels))
    written = sum(len(media.without_marks(str(message.content))) for message in chat.messages) - len(mark)
    return Readings(
        readings=readings, shared=len(shared), media=before.media, characters=written + sum(map(len, texts))
    )


def _messages(body: DecisionRequest, media: MediaParts, mark: str) -> list[Message]:
    """Return the input as messages; the last is the user's and ends with ``mark``, where the questions are asked."""
    given = (
        body.input
        if isinstance(body.input, str)
        else [_with_texts(number, item) for number, item in enumerate(body.input)]
    )
    items = read_items("input", given, {})
    check_size("input", items)
    fields = {item["id"]: f"input[{number}]" for number, item in enumerate(items)}
    messages = messages_of(None, items, ItemTexts(media, offered_tools(()), fields))
    if not messages:
        raise empty_prompt_error("input")
    last = messages[-1]
    if last.role != "user":
        return [*messages, Message(role="user", content=mark)]
    return [*messages[:-1], Message(role="user", content=f"{last.content}\n\n{mark}")]


def _with_texts(number: int, item: Json) -> Json:
    """Return an item of the input whose JSON is text. Raises ValidationError."""
    parts = item.get("content")
    if not isinstance(parts, list):
        return item
    read = [
        {"type": "input_text", "text": json_text(f"input[{number}].content[{place}]", part)}
        if isinstance(part, dict) and part.get("type") == "input_json"
        else part
        for place, part in enumerate(parts)
    ]
    return item | {"content": read}


@dataclass(frozen=True, slots=True)
class _Ending:
    """The tokens between a question and its answer, and those of each label after them."""

    tokens: tuple[int, ...]
    labels: dict[str, tuple[int, ...]]


async def _ending(context: Context, text: str, asked: Sequence[Wording]) -> _Ending:
    """Tokenize what follows a question: a label may be joined with the end of ``text`` to one token."""
    labels = [*dict.fromkeys(label for wording in asked for label in wording.labels)]
    texts = [text, *(text + label for label in labels)]
    found = await context.engine.queries.tokenize_texts(texts, add_special=False)
    common = min(common_length(found[0], tokens) for tokens in found[1:])
    return _Ending(found[0][:common], {label: ids[common:] for label, ids in zip(labels, found[1:], strict=True)})


def _check_labels(wording: Wording, labels: LabelTokens) -> None:
    """Require that no label's tokens begin with those of another. Raises GenerationError."""
    ordered = sorted(zip(labels.labels, wording.labels, strict=True))
    for (first, name), (second, other) in pairwise(ordered):
        if second[: len(first)] == first:
            raise GenerationError(f"the model reads the answers {name} and {other} as the same tokens")
