"""The formats in which models write their thoughts before an answer, recognized from their chat templates.

Prompts have thoughts in them, too: those of earlier replies, and the beginning or the end of the next one.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

_CONTROL = re.compile(r"<[^<>]+>")
Json = dict[str, Any]
# Variables of templates that switch thoughts on or off.
_SWITCH = re.compile(r"\benable_thinking\b|\bthinking is (not )?defined\b|\bif (not )?thinking\b")
# gpt-oss knows three efforts.
_HARMONY_EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ThoughtFormat:
    """A thought stands between ``opening`` and ``closing``.

    ``shown_by``: texts that the templates of these models contain.
    ``ending``: what the server writes to end a thought, so that the answer follows.
    ``frames``: texts around the answer that are part of neither.
    ``answer_openings``: texts behind which an answer or a call follows, and no further thought.
    ``recurs``: more thoughts may follow the first one, also behind a part of the answer.
    """

    opening: str
    closing: str
    shown_by: tuple[str, ...]
    ending: str
    answer_openings: tuple[str, ...]
    frames: tuple[str, ...] = ()
    recurs: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """All texts that the reader looks for."""
        return (self.opening, self.closing, *self.frames)

    @property
    def controls(self) -> frozenset[str]:
        """Texts that the reader must see even if they are control tokens, whose text is hidden otherwise."""
        return frozenset({*self.markers, *(control for text in self.markers for control in _CONTROL.findall(text))})


def _tagged(opening: str, closing: str, *frames: str, shown_by: tuple[str, ...] = ()) -> ThoughtFormat:
    return ThoughtFormat(
        opening=opening,
        closing=closing,
        shown_by=shown_by or (closing,),
        ending=f"{closing}\n\n",
        answer_openings=(closing,),
        frames=frames,
    )


# gpt-oss, whose output is a list of messages, each in a channel.
HARMONY = ThoughtFormat(
    opening="<|channel|>analysis<|message|>",
    closing="<|end|>",
    shown_by=("<|channel|>analysis",),
    ending="<|end|><|start|>assistant<|channel|>final<|message|>",
    answer_openings=("<|channel|>final<|message|>", "<|channel|>commentary"),
    frames=("<|start|>assistant", "<|channel|>final", "<|channel|>commentary", "<|message|>", "<|end|>"),
    recurs=True,
)
# DeepSeek, Qwen 3, QwQ, GLM, SmolLM 3, Nemotron, MiniMax, Kimi K2, Phi 4 and others.
THINK = _tagged("<think>", "</think>")
# Magistral and Ministral.
MISTRAL_THINK = _tagged("[THINK]", "[/THINK]")
SEED = _tagged("<seed:think>", "</seed:think>", shown_by=("<seed:think>",))
# Granite 3.2 writes sentences, Granite 3.3 two pairs of tags.
GRANITE_SENTENCES = _tagged("Here is my thought process:", "Here is my response:")
GRANITE_TAGS = _tagged("<think>", "</think>", "<response>", "</response>", shown_by=("<think>", "<response>"))
HUNYUAN = _tagged("<think>", "</think>", "<answer>", "</answer>", shown_by=("<think>", "<answer>"))
COMMAND = _tagged(
    "<|START_THINKING|>",
    "<|END_THINKING|>",
    "<|START_RESPONSE|>",
    "<|END_RESPONSE|>",
    shown_by=("<|START_THINKING|>",),
)
APERTUS = _tagged("<|inner_prefix|>", "<|inner_suffix|>", shown_by=("<|inner_prefix|>",))
GEMMA_4 = _tagged("<|channel>thought\n", "<channel|>")
EXAONE = _tagged("<thought>", "</thought>")
KIMI = _tagged("◁think▷", "◁/think▷")
KIMI_K3 = replace(
    _tagged(
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        "<|open|>response<|sep|>",
        "<|close|>response<|sep|>",
        "<|close|>message<|sep|>",
        shown_by=("<|open|>", "<|sep|>", "open_tag('think'"),
    ),
    ending="<|close|>think<|sep|><|open|>response<|sep|>",
)

# Muse Glimmer, whose output is a list of messages, each to a recipient.
MUSE = ThoughtFormat(
    opening="to=self<|message|>",
    closing="<|eom|>",
    shown_by=("to=self<|message|>",),
    ending="<|eom|><|start|>assistant to=user<|message|>",
    answer_openings=("to=user<|message|>", "<atem:function_calls>"),
    frames=("<|start|>assistant", "to=user<|message|>", "<|eom|>"),
    recurs=True,
)

# The first match counts: the template of a format with tags of its own may contain the tags of a later one, too.
FORMATS = (
    HARMONY, MUSE, MISTRAL_THINK, SEED, GRANITE_SENTENCES, COMMAND, APERTUS, GEMMA_4, EXAONE, KIMI, KIMI_K3,
    GRANITE_TAGS, HUNYUAN, THINK,
)  # fmt: skip


def thought_format_of(template: str) -> ThoughtFormat | None:
    """Return the format whose text the template contains; None if the model does not write thoughts."""
    return next((known for known in FORMATS if all(text in template for text in known.shown_by)), None)


class Beginning(Enum):
    """The first part of an output."""

    # A thought if the model opens one, else the answer.
    UNDECIDED = auto()
    # A thought, which the prompt has opened.
    THOUGHT = auto()
    # The rest of an answer.
    ANSWER = auto()


def beginning_after(thought_format: ThoughtFormat, prompt: str, continued: str | None) -> Beginning:
    """Return what an output behind ``prompt`` begins with.

    ``continued``: the message of the assistant at the end of the prompt that the output continues, if there is one.
    """
    if continued:
        opened = continued.rfind(thought_format.opening) > continued.rfind(thought_format.closing)
        return Beginning.THOUGHT if opened else Beginning.ANSWER
    opened = prompt.rstrip().endswith(thought_format.opening.rstrip())
    return Beginning.THOUGHT if opened else Beginning.UNDECIDED


class Thinking(Enum):
    """Whether a model is to think."""

    # The template decides.
    FREE = auto()
    ON = auto()
    OFF = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class ThoughtPlan:
    """How a reply thinks. ``max_tokens``: the most tokens of its thought; None for no limit.

    ``options``: variables for the template. ``opened``: the prompt must open the thought that ``thinking`` asks for.
    ``can_end``: the client may end the thought while it is written.
    """

    thought_format: ThoughtFormat
    thinking: Thinking = Thinking.FREE
    options: dict[str, bool | str] = field(default_factory=dict)
    max_tokens: int | None = None
    opened: bool = False
    can_end: bool = False

    def prompt_end(self, prompt: str, template: str) -> str:
        """Return what to write behind ``prompt``, as ``template`` rendered it, where it opens the assistant's turn."""
        known = self.thought_format
        is_open = beginning_after(known, prompt, None) is Beginning.THOUGHT
        is_closed = prompt.rstrip().endswith(known.closing)
        match self.thinking:
            case Thinking.OFF if is_open:
                return known.ending
            case Thinking.OFF if not is_closed and not _SWITCH.search(template):
                # The model would open a thought: it gets an empty one.
                return f"{known.opening}\n\n{known.ending}" if known is not HARMONY else known.opening + known.ending
            case Thinking.ON if self.opened and not is_open and not is_closed:
                return known.opening
            case _:
                return ""


def template_options(thinking: Thinking, effort: str | None, thought_format: ThoughtFormat) -> dict[str, bool | str]:
    """Return the variables with which templates switch thoughts on or off, or show an effort."""
    if thinking is Thinking.FREE:
        return {}
    switch = thinking is Thinking.ON
    options: dict[str, bool | str] = {"enable_thinking": switch, "thinking": switch}
    if effort is not None and switch:
        options["reasoning_effort"] = _HARMONY_EFFORTS.get(effort, effort) if thought_format is HARMONY else effort
    return options


def with_thoughts(messages: Sequence[Json], template: str, *, continued: bool) -> list[Json]:
    """Return the messages with their ``reasoning_content`` in the form that the template reads.

    A template that reads none gets none. ``continued``: the output continues the last message.
    """
    last = len(messages) - 1
    return [
        _with_thought(message, template, text_only=continued and number == last)
        for number, message in enumerate(messages)
    ]


def _with_thought(message: Json, template: str, *, text_only: bool) -> Json:
    if "reasoning_content" not in message or "reasoning_content" in template:
        return message
    bare = {key: value for key, value in message.items() if key != "reasoning_content"}
    thought, content = message["reasoning_content"], message["content"]
    if thought_format_of(template) is MISTRAL_THINK:
        # Mistral's templates read a list of blocks.
        blocks = [{"type": "thinking", "thinking": thought}, *([{"type": "text", "text": content}] if content else [])]
        return bare if text_only else bare | {"content": blocks}
    if content and "tool_calls" in message:
        # The template of gpt-oss refuses a message that has a thought, a text and calls.
        return bare
    return bare | {"thinking": thought}
