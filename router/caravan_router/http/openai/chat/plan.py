"""A chat request to what its template gets and what its output may be; knows nothing of tokens yet."""

from dataclasses import dataclass

import msgspec

from caravan_router.chat.control_text import strings_of
from caravan_router.chat.prompt import ChatPrompt, Conversation, TooManyControlTextsError, prompt_of, template_of
from caravan_router.chat.template_renderer import TemplateError, TemplateOutputError
from caravan_router.chat.tool_format import GENERIC, MISTRAL, ToolFormat, knows_tools, tool_format_of
from caravan_router.chat.tool_parser import ToolParser
from caravan_router.chat.tool_prompt import DEFAULT_TOOL_PROMPT, with_instruction, with_short_ids, with_tools_as_text
from caravan_router.core.engine import ModelFacts
from caravan_router.http.generation.bounds import bounds_of
from caravan_router.http.generation.rules import ContinueError, ControlTextsError, TooManyBytesError
from caravan_router.http.openai.chat.messages import template_messages, template_tools
from caravan_router.http.openai.chat.schema import ChatRequest
from caravan_router.http.openai.chat.tools import NO_TOOLS, ToolPlan, tool_plan_of
from caravan_router.http.server.errors import ChatTemplateError
from caravan_router.http.server.state import AppState


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPlan:
    """``tools``: what the output may call, in the words of ``tool_format``."""

    conversation: Conversation
    tools: ToolPlan
    tool_format: ToolFormat

    def parser(self) -> ToolParser | None:
        """One for each output; None where there is nothing to call."""
        if not self.tools.callable:
            return None
        names = {tool.function.name for tool in self.tools.callable}
        return ToolParser(self.tool_format, names, None if self.tools.several else 1)


# Of a prompt that was written elsewhere.
NO_PLAN = ChatPlan(conversation=Conversation(messages=()), tools=NO_TOOLS, tool_format=GENERIC)


def chat_plan_of(state: AppState, model: ModelFacts, request: ChatRequest) -> ChatPlan:
    """Raises ValidationError, ToolError, ChatTemplateError."""
    plan = tool_plan_of(request, state.limits)
    try:
        source = template_of(model, tools=bool(plan.tools))
    except TemplateError as error:
        raise ChatTemplateError(str(error)) from error
    messages = template_messages(request.messages, developer_known="developer" in source)
    tool_format = tool_format_of(source)
    tools = template_tools(plan.tools)
    if tool_format == MISTRAL:
        messages = with_short_ids(messages)
    if not knows_tools(source):
        if tools or any(message["role"] == "tool" or "tool_calls" in message for message in messages):
            messages = with_tools_as_text(messages, tools, request.tool_prompt or DEFAULT_TOOL_PROMPT)
    elif tools and request.tool_prompt:
        messages = with_instruction(messages, request.tool_prompt)
    continued = _continued(request)
    conversation = Conversation(
        messages=messages,
        tools=tools or None,
        options=msgspec.to_builtins(request.chat_template_kwargs or {}),
        continued=continued,
        generation_prompt=request.add_generation_prompt is not False,
    )
    return ChatPlan(conversation=conversation, tools=plan, tool_format=tool_format)


def _continued(request: ChatRequest) -> bool:
    last = request.messages[-1]
    can_be = last.role == "assistant" and not last.tool_calls
    if request.continue_final_message is None:
        # TGI's way: an answer that was begun is gone on with.
        return can_be and request.add_generation_prompt is not True
    if request.continue_final_message and not can_be:
        raise ContinueError("the last message is not the assistant's, or calls tools")
    if request.continue_final_message and request.add_generation_prompt:
        raise ContinueError("`add_generation_prompt` is")
    return request.continue_final_message


async def chat_prompt_of(state: AppState, model: ModelFacts, plan: ChatPlan) -> ChatPrompt:
    """Raises ValidationError, ChatTemplateError, NoShardError, TextTooLongError."""
    limit = bounds_of(state.limits, model).max_prompt_bytes
    # Before any of it is tokenized. What the template adds is counted after it.
    size = sum(len(text.encode()) for text in strings_of(list(plan.conversation.messages)))
    if size > limit:
        raise TooManyBytesError("messages", limit, size)
    try:
        return await prompt_of(state.engine, state.templates, model, plan.conversation, limit)
    except TemplateOutputError as error:
        raise TooManyBytesError("messages", error.limit_bytes, error.given_bytes) from error
    except TemplateError as error:
        raise ChatTemplateError(str(error)) from error
    except TooManyControlTextsError as error:
        raise ControlTextsError(error.limit, error.given) from error
