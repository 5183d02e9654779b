"""Plans a chat generation: the rendered prompt, the thoughts of the output, and the tools that it may call."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from caravan_dialects.api.errors import ChatTemplateError
from caravan_dialects.api.generation.context import PromptContext
from caravan_dialects.api.generation.parts import NO_MEDIA, MediaParts
from caravan_dialects.api.generation.prompt import decoded
from caravan_dialects.api.generation.rules import PromptTooManyBytesError
from caravan_dialects.api.openai.chat.messages import (
    NO_TOOLS,
    ToolPlan,
    template_messages,
    template_tools,
    tool_plan_of,
)
from caravan_dialects.api.openai.chat.schema import ChatRequest
from caravan_dialects.api.openai.chat.thinking import template_kwargs_of, thought_plan_of
from caravan_dialects.api.openai.rules import continue_error, control_texts_error
from caravan_dialects.chat.control_text import strings_of
from caravan_dialects.chat.prompt import (
    ChatPrompt,
    Conversation,
    TooManyControlTextsError,
    prompt_of,
    prompt_up_to,
    template_of,
)
from caravan_dialects.chat.template_messages import TemplateError, TemplateOutputError
from caravan_dialects.chat.thought_format import ThoughtPlan, thought_format_of, with_thoughts
from caravan_dialects.chat.tool_format import knows_tools
from caravan_dialects.chat.tool_prompt import DEFAULT_TOOL_PROMPT, with_instruction, with_short_ids, with_tools_as_text

# Templates with this text refuse ids of another form than Mistral's.
_MISTRAL_CALLS = "[TOOL_CALLS]"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPlan:
    """``tools``: what the output may call. ``template``: the source of the template; "" without messages.

    ``reads_thoughts``: thoughts are split off the output; `Conversation.thought` has their format. ``hides_thoughts``:
    the reply lacks them. ``media``: the pictures and sounds whose marks the conversation has.
    """

    conversation: Conversation
    tools: ToolPlan
    template: str = ""
    reads_thoughts: bool = False
    hides_thoughts: bool = False
    media: MediaParts = NO_MEDIA

    @property
    def thought(self) -> ThoughtPlan | None:
        """How the reply thinks; None if the model does not think."""
        return self.conversation.thought


# The plan of a prompt that does not come from messages.
NO_PLAN = ChatPlan(conversation=Conversation(messages=()), tools=NO_TOOLS)


def chat_plan_of(
    context: PromptContext, body: ChatRequest, *, constrained: bool, media: MediaParts | None = None
) -> ChatPlan:
    """Plan the reply to ``body``; ``constrained``: the answer has a constraint.

    ``media``: pictures and sounds that the messages have marks of; those that the messages have themselves are added.

    Raises ValidationError, ToolError, ChatTemplateError.
    """
    plan = tool_plan_of(body, context.limits)
    try:
        source = template_of(context.model, tools=bool(plan.tools))
    except TemplateError as error:
        raise ChatTemplateError(str(error)) from error
    media = MediaParts(context.model.media) if media is None else media
    messages = template_messages(body.messages, media, developer_known="developer" in source)
    tools = template_tools(plan.tools)
    if _MISTRAL_CALLS in source:
        messages = with_short_ids(messages)
    if not knows_tools(source):
        if tools or any(message["role"] == "tool" or "tool_calls" in message for message in messages):
            messages = with_tools_as_text(messages, tools, body.tool_prompt or DEFAULT_TOOL_PROMPT)
    elif tools and body.tool_prompt:
        messages = with_instruction(messages, body.tool_prompt)
    given = {**context.limits.chat_template_kwargs, **template_kwargs_of(body)}
    thought = thought_plan_of(
        body,
        thought_format_of(source),
        given,
        context.limits,
        constrained=constrained or plan.required,
    )
    continued = _continued(body)
    conversation = Conversation(
        messages=with_thoughts(messages, source, continued=continued),
        tools=tools or None,
        options=(thought.options if thought else {}) | given,
        continued=continued,
        generation_prompt=body.add_generation_prompt is not False,
        thought=thought,
    )
    return ChatPlan(
        conversation=conversation,
        tools=plan,
        template=source,
        reads_thoughts=thought is not None and body.reasoning_format != "none",
        hides_thoughts=body.include_reasoning is False,
        media=media,
    )


def _continued(body: ChatRequest) -> bool:
    """Return whether the output continues the last message."""
    last = body.messages[-1]
    can_be = last.role == "assistant" and not last.tool_calls
    if body.continue_final_message is None:
        # TGI continues an assistant's message at the end.
        return can_be and body.add_generation_prompt is not True
    if body.continue_final_message and not can_be:
        raise continue_error("the last message is not the assistant's, or calls tools")
    if body.continue_final_message and body.add_generation_prompt:
        raise continue_error("`add_generation_prompt` is")
    return body.continue_final_message


async def chat_prompt_of(context: PromptContext, plan: ChatPlan, field: str = "messages") -> ChatPrompt:
    """Render and tokenize. ``field``: what the client calls the messages.

    Raises ValidationError, ChatTemplateError, NoShardError, TextTooLongError.
    """
    conversation = await _checked_conversation(context, plan, field)
    limit = context.bounds.max_prompt_bytes
    with _template_errors(context, field):
        return await prompt_of(context.engine, context.templates, context.model, conversation, limit)


async def chat_prompt_up_to(context: PromptContext, plan: ChatPlan, field: str, mark: str) -> tuple[ChatPrompt, str]:
    """Return the prompt before ``mark`` in the last message, and what the template writes after it.

    ``field``: what the client calls the messages. Raises what `chat_prompt_of` raises.
    """
    conversation = await _checked_conversation(context, plan, field)
    cut = mark, context.bounds.max_prompt_bytes
    with _template_errors(context, field):
        return await prompt_up_to(context.engine, context.templates, context.model, conversation, cut)


async def _checked_conversation(context: PromptContext, plan: ChatPlan, field: str) -> Conversation:
    limit, total = context.bounds.max_prompt_bytes, context.bounds.max_total_tokens
    # Checked before rendering; the rendered prompt is checked again, since the template adds text.
    size = sum(len(text.encode()) for text in strings_of(list(plan.conversation.messages)))
    if size > limit:
        raise PromptTooManyBytesError(field, limit, size, total)
    if plan.media.files:
        return replace(plan.conversation, media=await decoded(context, plan.media))
    return plan.conversation


@contextmanager
def _template_errors(context: PromptContext, field: str) -> Iterator[None]:
    """Raise errors of rendering as a client reads them."""
    try:
        yield
    except TemplateOutputError as error:
        total = context.bounds.max_total_tokens
        raise PromptTooManyBytesError(field, error.limit_bytes, error.given_bytes, total) from error
    except TemplateError as error:
        raise ChatTemplateError(str(error)) from error
    except TooManyControlTextsError as error:
        raise control_texts_error(error.limit, error.given) from error
