"""What an operator may pin: a prompt that is turned into tokens as a client's is, for the requests of one API key."""

from caravan_dialects.api.admin.rules import pin_field_error, pin_limit_error, pin_source_error, short_pin_error
from caravan_dialects.api.admin.schema import PinRequest
from caravan_dialects.api.generation.context import Context
from caravan_dialects.api.generation.prompt import check_prompt_ids, fit, tokenize_prompt
from caravan_dialects.api.generation.serving import namespace_of
from caravan_dialects.api.openai.chat.plan import chat_plan_of, chat_prompt_of
from caravan_dialects.api.openai.chat.schema import ChatRequest
from caravan_proto.messages.sampling import SamplingParams
from caravan_scheduler.core.generation import GenerationSpec, StoppingParams, Tenant
from caravan_scheduler.core.prefixes import PinRefusal, PrefixReport
from caravan_scheduler.core.prompt_media import PromptMedia
from caravan_scheduler.prefix_keys import BLOCK_TOKENS

_WITH_MESSAGES = ("tools", "tool_prompt", "chat_template_kwargs", "add_generation_prompt")


async def pinned_spec(context: Context, body: PinRequest, tenant: Tenant) -> GenerationSpec:
    """Return a generation of one token whose prompt is the prefix. Raises RequestError, EngineError."""
    namespace = namespace_of(tenant, body.cache_salt, context.limits)
    token_ids, media = await _prompt(context, body)
    fit(token_ids, 1, context.bounds, ("prompt" if body.messages is None else "messages", "new tokens"))
    check_length(len(token_ids))
    return GenerationSpec(
        prompt=token_ids,
        media=media,
        sampling=SamplingParams(temperature=0.0),
        stopping=StoppingParams(max_new_tokens=1),
        tenant=tenant,
        namespace=namespace,
        adapter=context.adapter_key,
        traceparent=context.sender.traceparent,
        request_id=context.sender.request_id,
    )


async def _prompt(context: Context, body: PinRequest) -> tuple[tuple[int, ...], PromptMedia | None]:
    given = [field for field in ("prompt", "messages") if getattr(body, field) is not None]
    if len(given) != 1:
        raise pin_source_error(" and ".join(given) or "neither")
    if body.messages is not None:
        chat = ChatRequest(
            messages=body.messages,
            tools=body.tools,
            tool_prompt=body.tool_prompt,
            chat_template_kwargs=body.chat_template_kwargs,
            add_generation_prompt=body.add_generation_prompt or False,
        )
        prompt = await chat_prompt_of(context, chat_plan_of(context, chat, constrained=False))
        return prompt.tokens.token_ids, prompt.media
    for field in _WITH_MESSAGES:
        if (value := getattr(body, field)) is not None:
            raise pin_field_error(field, value)
    if isinstance(body.prompt, str):
        return (await tokenize_prompt(context.engine, "prompt", body.prompt, context.bounds)).token_ids, None
    token_ids = tuple(body.prompt or ())
    check_prompt_ids("prompt", token_ids, context)
    return token_ids, None


def check_length(tokens: int) -> None:
    """Require a prefix that is long enough to be saved. Raises ValidationError."""
    if tokens < BLOCK_TOKENS:
        raise short_pin_error(BLOCK_TOKENS, tokens)


def accepted(pinned: PrefixReport | PinRefusal | None) -> PrefixReport | None:
    """Return the prefix, if it is known, unless it was refused. Raises ValidationError."""
    if isinstance(pinned, PinRefusal):
        raise pin_limit_error(pinned.limit_bytes, pinned.needed_bytes)
    return pinned
