"""Rules of chat completions: OpenAI's, TGI's and vLLM's."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from caravan_dialects.api.errors import ToolError
from caravan_dialects.api.generation.checks import check_positive, check_range
from caravan_dialects.api.generation.constraints import FieldConstraint
from caravan_dialects.api.generation.context import Context
from caravan_dialects.api.generation.fill import prompt_before
from caravan_dialects.api.generation.parts import NO_MEDIA, MediaParts
from caravan_dialects.api.generation.prompt import (
    check_new_tokens,
    check_prompt_ids,
    clamped,
    fit,
    tokenize_mixed,
    tokenize_plain,
    tokenize_prompt,
)
from caravan_dialects.api.generation.run import Run, ValidRequest
from caravan_dialects.api.limits import Bounds
from caravan_dialects.api.openai.beams import check_beams, with_beams
from caravan_dialects.api.openai.chat.enforced import IN_CHAT, SchemaPlaces, Wanted, enforced
from caravan_dialects.api.openai.chat.messages import template_tools, texts_of_parts
from caravan_dialects.api.openai.chat.output import NO_OPTIONS, ChatOutput, WholeOutput
from caravan_dialects.api.openai.chat.plan import NO_PLAN, ChatPlan, chat_plan_of, chat_prompt_of
from caravan_dialects.api.openai.chat.schema import ChatRequest, LeftOut
from caravan_dialects.api.openai.choices import ONE_CHOICE, Choices
from caravan_dialects.api.openai.constraints import constraint_of
from caravan_dialects.api.openai.rules import needs_field_error, prompt_tokens_error, stream_options_error
from caravan_dialects.api.openai.sampling import (
    biases_of,
    check_choice_parameters,
    check_sampling,
    one_of,
    samplings_of,
    stopping_of,
    text_options_of,
)
from caravan_dialects.chat.control_text import strings_of
from caravan_dialects.chat.prompt import ChatPrompt, with_exact_tokens
from caravan_dialects.chat.thought_format import Beginning, beginning_after
from caravan_dialects.chat.thought_reader import ThoughtCalls, ThoughtReader
from caravan_dialects.chat.tool_format import ToolFormat
from caravan_dialects.chat.tool_grammar import functions_of
from caravan_dialects.chat.tool_parser import ToolParser
from caravan_dialects.text.assembler import TextOptions
from caravan_proto.messages.constraint import ConstraintKind, Thought
from caravan_proto.messages.model import TokenizedText
from caravan_scheduler.core.engine import ModelFacts
from caravan_scheduler.core.generation import GenerationSpec
from caravan_scheduler.core.prompt_media import PromptMedia


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidChat:
    """``model``: the name that the reply shows.

    ``beginning``: what the output begins with. ``tool_format``: how it calls tools; None if there is nothing to call.
    ``answer_text``: how the answer ends where `output` looks for stop
    strings: they do not count in thoughts, and some replies name the one that was found. ``left_out``: turns that the
    prompt lacks. ``ignored_options``: variables for the template that it does not read.
    """

    request: ValidRequest
    plan: ChatPlan
    model: str
    logprobs: bool
    beginning: Beginning
    choices: Choices
    tool_format: ToolFormat | None = None
    answer_text: TextOptions = NO_OPTIONS
    left_out: LeftOut | None = None
    ignored_options: tuple[str, ...] = ()

    @property
    def thinks(self) -> bool:
        """Whether thoughts are split off the output."""
        return self.plan.reads_thoughts

    def output(self, run: Run) -> ChatOutput:
        """Return the reader of one choice's output."""
        output = self._output(run)
        output.hides_thoughts = self.plan.hides_thoughts
        return output

    def _output(self, run: Run) -> ChatOutput:
        thought = self.plan.thought if self.plan.reads_thoughts else None
        reader = None
        if thought is not None:
            most = thought.max_tokens if self.beginning is Beginning.THOUGHT else None
            reader = ThoughtReader(thought.thought_format, self.beginning, most)
        if self.tool_format is None:
            return ChatOutput(run, None, reader, self.answer_text)
        tools, known = self.plan.tools, self.tool_format
        functions = functions_of(template_tools(tools.callable))
        most = None if tools.several else 1
        # A constraint begins behind the thought. Without an opening, a call cannot be told from a thought.
        free = reader is not None and not tools.required and not known.unopened
        thought_calls = ThoughtCalls(known, functions, most) if free else None
        return ChatOutput(
            run, ToolParser(known, functions, most), reader, self.answer_text, thought_calls=thought_calls
        )

    def best(self, outputs: Sequence[WholeOutput]) -> list[WholeOutput]:
        """Return the outputs of the choices, out of those of all candidates."""
        return [outputs[index] for index in self.choices.best([output.pieces for output in outputs])]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSource:
    """A chat request, whatever dialect it came in.

    ``raw``: the whole prompt as text, in place of messages. ``suffix``: if not empty, the output belongs between
    ``raw`` and this text; the model must have tokens for that. ``earlier``: tokens before those of the messages.
    ``exact``: tokens that the prompt begins with as far as they stand for its text. ``names``: what the client calls
    messages and new tokens. ``clamps``: a number of new tokens that does not fit counts as all that fit.
    ``tells_stop``: the reply names the stop string that ended it. ``max_prompt_tokens``: the client's own limit of the
    prompt; None for none. ``media``: pictures and sounds that the messages, or ``raw``, have marks of. ``places``: what
    the client calls the fields with schemas.
    """

    body: ChatRequest
    raw: str | None = None
    suffix: str = ""
    earlier: tuple[int, ...] = ()
    exact: tuple[int, ...] = ()
    names: tuple[str, str] = ("messages", "max_tokens")
    clamps: bool = False
    tells_stop: bool = False
    max_prompt_tokens: int | None = None
    media: MediaParts | None = None
    places: SchemaPlaces = IN_CHAT


@dataclass(frozen=True, slots=True)
class _Prompt:
    plan: ChatPlan
    tokens: tuple[int, ...]
    beginning: Beginning = Beginning.UNDECIDED
    media: PromptMedia | None = None
    ignored_options: tuple[str, ...] = ()


async def validate_whole_chat(context: Context, source: ChatSource, choices: Choices = ONE_CHOICE) -> ValidChat:
    """Check sampling, then the prompt, then the constraint.

    Raises ValidationError, ToolError, ChatTemplateError, NoShardError, TextTooLongError.
    """
    body, limits, model, bounds = source.body, context.limits, context.model, context.bounds
    serving = context.serving(body)
    max_tokens = _check_fields(body, bounds)
    check_choice_parameters(body.choice_parameters, choices.candidates)
    check_beams(body, choices.n, model)
    biases = biases_of(body.logit_bias, limits, model)
    text = text_options_of(body, limits)
    asked = constraint_of(body, limits, source.places.answer)
    prompt = await _prompt(context, source, asked)
    plan, beginning = prompt.plan, prompt.beginning
    if source.clamps:
        max_tokens = clamped(prompt.tokens, max_tokens, bounds)
    max_new = fit(prompt.tokens, max_tokens, bounds, source.names)
    check_new_tokens(source.names[1], choices.candidates, max_new, bounds)
    stopping = stopping_of(body, max_new, model)
    prediction = await _prediction(context, body, drafts=serving["max_draft_tokens"] > 0)
    tool_format = await context.templates.tool_formats.of(plan.template) if plan.tools.callable else None
    wanted = Wanted(plan=plan, tool_format=tool_format, asked=asked, places=source.places)
    constraint = await enforced(context, wanted)
    thought = await _thought(context, plan, beginning, constrained=constraint is not None)
    alternatives = (body.top_logprobs or 0) if body.logprobs or choices.ranked else None
    samplings = samplings_of(body, choices.candidates, model, alternatives=alternatives, biases=biases)
    in_output = plan.reads_thoughts or source.tells_stop
    request = ValidRequest(
        specs=with_beams(
            [
                GenerationSpec(
                    prompt=prompt.tokens,
                    sampling=sampling,
                    stopping=stopping,
                    media=prompt.media,
                    constraint=constraint,
                    adapter=context.adapter_key,
                    prediction=prediction,
                    thought=thought,
                    **serving,
                )
                for sampling in samplings
            ],
            body,
            model,
        ),
        text=replace(text, stops=()) if in_output else text,
        characters=_characters(source, plan),
    )
    return ValidChat(
        request=request,
        # The files were decoded, and would be in memory as long as the reply is generated.
        plan=replace(plan, media=NO_MEDIA),
        model=context.adapter or model.name,
        logprobs=bool(body.logprobs),
        beginning=beginning,
        choices=choices,
        tool_format=tool_format and tool_format.with_controls(await _call_controls(context, plan)),
        answer_text=text if in_output else NO_OPTIONS,
        ignored_options=prompt.ignored_options,
    )


async def _prompt(context: Context, source: ChatSource, asked: FieldConstraint | None) -> _Prompt:
    if source.raw is not None and source.suffix:
        before = await tokenize_plain(context.engine, "prompt", source.raw, context.bounds)
        return _Prompt(NO_PLAN, await prompt_before(context, before, source.suffix))
    if source.raw is not None:
        raw = await tokenize_mixed(context, "prompt", source.raw, source.media)
        tokens = _after(source.earlier, raw.tokens, context.model)
        return _Prompt(NO_PLAN, tokens, media=None if raw.media is None else raw.media.located(tokens))
    if (token_ids := source.body.prompt_token_ids) is not None:
        if source.body.messages or source.body.tools:
            raise prompt_tokens_error("messages" if source.body.messages else "tools")
        check_prompt_ids("prompt_token_ids", token_ids, context)
        return _Prompt(NO_PLAN, tuple(token_ids))
    plan = chat_plan_of(context, source.body, constrained=asked is not None, media=source.media)
    if asked is not None and plan.tools.tools and asked.constraint.kind is not ConstraintKind.JSON_SCHEMA:
        raise ToolError(
            f"Grammar and tools are mutually exclusive, unless it is a JSON schema. Given: `tools` and `{asked.field}`"
        )
    prompt = await chat_prompt_of(context, plan, source.names[0])
    if source.exact:
        tokens = await with_exact_tokens(context.engine, source.exact, prompt.tokens)
    else:
        tokens = _after(source.earlier, prompt.tokens, context.model)
    media = None if prompt.media is None else prompt.media.located(tokens)
    ignored = tuple(key for key in prompt.ignored_options if key in (source.body.chat_template_kwargs or {}))
    return _Prompt(plan, tokens, _beginning(plan, prompt), media, ignored)


def _beginning(plan: ChatPlan, prompt: ChatPrompt) -> Beginning:
    conversation = plan.conversation
    if conversation.thought is None:
        return Beginning.UNDECIDED
    continued = conversation.messages[-1]["content"] if conversation.continued else None
    return beginning_after(conversation.thought.thought_format, prompt.text, continued)


async def _thought(context: Context, plan: ChatPlan, beginning: Beginning, *, constrained: bool) -> Thought | None:
    """Return the thought that shards must know of, because they end it or constrain what follows it."""
    thought = plan.thought
    may_be_forced = thought is not None and (thought.max_tokens is not None or thought.can_end)
    if thought is None or beginning is not Beginning.THOUGHT or not (may_be_forced or constrained):
        return None
    known, ending = thought.thought_format, tuple[int, ...]()
    if may_be_forced:
        ending = (await context.engine.queries.tokenize(known.ending, add_special=False)).token_ids
    closings = tuple(opening.encode() for opening in known.answer_openings)
    # Where several thoughts are usual, the answer follows a part of them in each.
    opening = b"" if known.recurs or not ending else known.opening.encode()
    return Thought(closings=closings, ending=ending, max_tokens=thought.max_tokens, opening=opening)


async def _call_controls(context: Context, plan: ChatPlan) -> frozenset[str]:
    """Return the tags around calls that are control tokens, but for those that mark thoughts, too."""
    controls = await context.templates.tool_formats.controls(context.engine, plan.template)
    return controls if plan.thought is None else controls - plan.thought.thought_format.controls


def _after(earlier: tuple[int, ...], prompt: TokenizedText, model: ModelFacts) -> tuple[int, ...]:
    """Return both, with a begin token at the start only."""
    if not earlier:
        return prompt.token_ids
    begins = prompt.specials[:1] == (True,) and prompt.pieces[0] == model.bos_text.encode()
    begin = prompt.token_ids[: int(begins)]
    whole = earlier + prompt.token_ids[len(begin) :]
    return whole if whole[: len(begin)] == begin else begin + whole


def _characters(source: ChatSource, plan: ChatPlan) -> int:
    if source.raw is not None:
        return len(source.raw if source.media is None else source.media.without_marks(source.raw))
    texts = (text for message in plan.conversation.messages for text in strings_of(message["content"]))
    return sum(len(plan.media.without_marks(text)) for text in texts)


def _check_fields(body: ChatRequest, bounds: Bounds) -> int | None:
    """Return the number of new tokens asked for; None for all that fit."""
    check_sampling(body)
    check_range("top_logprobs", body.top_logprobs, 0, bounds.max_top_n_tokens)
    if body.top_logprobs and not body.logprobs:
        raise needs_field_error("top_logprobs", "`logprobs` is true", body.top_logprobs)
    if body.stream_options is not None and not body.stream:
        raise stream_options_error()
    check_positive("max_tokens", body.max_tokens)
    check_positive("max_completion_tokens", body.max_completion_tokens)
    return one_of("max_tokens", "max_completion_tokens", body.max_tokens, body.max_completion_tokens)


async def _prediction(context: Context, body: ChatRequest, *, drafts: bool) -> tuple[int, ...]:
    """Return the tokens of the prediction; empty if there is none, or no ``drafts`` are wanted."""
    if body.prediction is None:
        return ()
    field, content = "prediction.content", body.prediction.content
    # Parts of one output, in which nothing is between them.
    text = content if isinstance(content, str) else "".join(texts_of_parts(field, content))
    if not text or not drafts:
        return ()
    # No output is longer than the context. What is beyond the longest prompt need not be tokenized to be cut off.
    text = text.encode()[: context.bounds.max_prompt_bytes].decode(errors="ignore")
    tokens = await tokenize_prompt(context.engine, field, text, context.bounds, add_special=False)
    return tokens.token_ids[: context.bounds.max_total_tokens]
