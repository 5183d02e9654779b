"""The formats in which models write their thoughts before an answer, recognized from their chat templates."""

import re
from dataclasses import dataclass, replace
from enum import Enum, auto

_CONTROL = re.compile(r"<[^<>]+>")


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
