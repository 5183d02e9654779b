"""OpenAI's, TGI's and vLLM's rules for chat completions."""

from dataclasses import dataclass, replace

from caravan_router.chat.tool_grammar import functions_of, tool_constraint
from caravan_router.core.constraint import Constraint
from caravan_router.core.sampling import StoppingParams
from caravan_router.http.generation.adapters import adapter_of_model
from caravan_router.http.generation.bounds import Bounds, bounds_of, model_of
from caravan_router.http.generation.candidates import check_candidates
from caravan_router.http.generation.checks import (
    check_new_tokens,
    check_positive,
    check_range,
    check_stops,
    fit,
    tokenize_prompt,
)
from caravan_router.http.generation.constraints import FieldConstraint, compiled, constraint_of_fields
from caravan_router.http.generation.request import ValidRequest
from caravan_router.http.generation.rules import MaxTokensError, NeedsFieldError, StreamOptionsError
from caravan_router.http.generation.serving import Extras, Serving
from caravan_router.http.limits import Limits
from caravan_router.http.openai.chat.messages import template_tools
from caravan_router.http.openai.chat.plan import NO_PLAN, ChatPlan, chat_plan_of, chat_prompt_of
from caravan_router.http.openai.chat.schema import ChatRequest
from caravan_router.http.openai.sampling import biases_of, check_choice_parameters, check_sampling, samplings_of
from caravan_router.http.server.errors import ToolError
from caravan_router.http.server.state import AppState


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidChat:
    """``model``: the name it is answered under."""

    request: ValidRequest
    plan: ChatPlan
    model: str
    logprobs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSource:
    """What is asked, by whatever route. ``raw``: the whole prompt, in place of messages.

    ``names``: what the client calls messages and new tokens. ``typical_p``: as chat completions have no word for it.
    """

    request: ChatRequest
    raw: str | None = None
    names: tuple[str, str] = ("messages", "max_tokens")
    typical_p: float | None = None


def choices_asked(request: ChatRequest, limits: Limits) -> int:
    """Raises ValidationError."""
    n = 1 if request.n is None else request.n
    check_candidates("n", n, limits)
    return n


async def validate_chat(state: AppState, source: ChatSource, serving: Serving, n: int) -> ValidChat:
    """Raises ValidationError (one class a rule), ToolError, ChatTemplateError, NoShardError, TextTooLongError."""
    request = source.request
    model = model_of(state.engine)
    bounds = bounds_of(state.limits, model)
    max_tokens = _check_fields(request, bounds)
    check_choice_parameters(request.choice_parameters, n)
    biases = biases_of(request.logit_bias, state.limits, model)
    stops = check_stops([request.stop] if isinstance(request.stop, str) else request.stop or (), state.limits)
    asked = constraint_of_fields(request, state.limits)
    if source.raw is None:
        plan = chat_plan_of(state, model, request)
        if asked is not None and plan.tools.tools:
            raise ToolError(f"Grammar and tools are mutually exclusive. Given: `tools` and `{asked.field}`")
        prompt = (await chat_prompt_of(state, model, plan)).tokens.token_ids
    else:
        plan = NO_PLAN
        prompt = (await tokenize_prompt(state.engine, "prompt", source.raw, bounds)).token_ids
    max_new = fit(prompt, max_tokens, bounds, source.names)
    check_new_tokens(source.names[1], n, max_new, bounds)
    adapter = adapter_of_model(request.model, model)
    extras = Extras(constraint=await _constraint(state, plan, asked), adapter=adapter)
    alternatives = (request.top_logprobs or 0) if request.logprobs else None
    samplings = samplings_of(request, n, model, alternatives=alternatives, biases=biases)
    if source.typical_p is not None:
        samplings = [replace(sampling, typical_p=source.typical_p) for sampling in samplings]
    stopping = StoppingParams(max_new_tokens=max_new, ignore_eos=bool(request.ignore_eos))
    valid = ValidRequest(
        specs=tuple(serving.spec(prompt, sampling, stopping, extras) for sampling in samplings),
        stops=stops,
        characters=_characters(source, plan),
    )
    return ValidChat(request=valid, plan=plan, model=adapter or model.name, logprobs=alternatives is not None)


def _characters(source: ChatSource, plan: ChatPlan) -> int:
    if source.raw is not None:
        return len(source.raw)
    return sum(len(message["content"]) for message in plan.conversation.messages)


def _check_fields(request: ChatRequest, bounds: Bounds) -> int | None:
    """Returns the most new tokens, None for all that fit."""
    check_sampling(request)
    check_range("top_logprobs", request.top_logprobs, 0, bounds.max_top_n_tokens)
    if request.top_logprobs and not request.logprobs:
        raise NeedsFieldError("top_logprobs", "`logprobs` is true", request.top_logprobs)
    if request.stream_options is not None and not request.stream:
        raise StreamOptionsError
    check_positive("max_tokens", request.max_tokens)
    check_positive("max_completion_tokens", request.max_completion_tokens)
    given, given_completion = request.max_tokens, request.max_completion_tokens
    if given is not None and given_completion is not None and given != given_completion:
        raise MaxTokensError(given, given_completion)
    return given if given_completion is None else given_completion


async def _constraint(state: AppState, plan: ChatPlan, asked: FieldConstraint | None) -> Constraint | None:
    if not plan.tools.required:
        return await compiled(state.engine, asked)
    functions = functions_of(template_tools(plan.tools.callable))
    constraint = await tool_constraint(state.engine, plan.tool_format, functions, several=plan.tools.several)
    size, limit = len(constraint.source.encode()), state.limits.max_constraint_bytes
    if size > limit:
        raise ToolError(f"the grammar of `tools` must have at most {limit} bytes. Given: {size}")
    problem = await state.engine.queries.compile_constraint(constraint)
    if problem is not None:
        raise ToolError(f"`tools` cannot be kept to: {problem}")
    return constraint
