"""The reader splits an output into thoughts and the answer, whatever its format and its borders."""

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from caravan_dialects.chat.thought_format import (
    APERTUS,
    COMMAND,
    EXAONE,
    GEMMA_4,
    GRANITE_SENTENCES,
    GRANITE_TAGS,
    HARMONY,
    HUNYUAN,
    KIMI,
    MISTRAL_THINK,
    MUSE,
    SEED,
    THINK,
    Beginning,
    ThoughtFormat,
    beginning_after,
    thought_format_of,
)
from caravan_dialects.chat.thought_reader import ReadPart, ThoughtPart, ThoughtReader
from caravan_dialects.chat.tool_parser import TextPart

UNDECIDED, THOUGHT, ANSWER = Beginning.UNDECIDED, Beginning.THOUGHT, Beginning.ANSWER


def read(reader: ThoughtReader, pieces: Sequence[str]) -> tuple[str, str]:
    """Return the thoughts and the answer."""
    parts: list[ReadPart] = [part for piece in pieces for part in reader.feed(piece)]
    parts += reader.finish()
    thoughts = "".join(part.text for part in parts if isinstance(part, ThoughtPart))
    return thoughts, "".join(part.text for part in parts if isinstance(part, TextPart))


FINAL = "<|channel|>final<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>"
COMMENTARY = "<|channel|>commentary<|message|>"
NEXT = "<|end|><|start|>assistant"

# Format, what the prompt ends with, output, thoughts, answer.
CASES: list[tuple[ThoughtFormat, Beginning, str, str, str]] = [
    # Qwen 3, GLM, SmolLM 3: the model opens the thought itself.
    (THINK, UNDECIDED, "<think>\nTwo and two.\n</think>\n\nFour.", "Two and two.", "Four."),
    (THINK, UNDECIDED, "\n<think>a</think>b", "a", "b"),
    (THINK, UNDECIDED, "<think>\n\n</think>\n\nFour.", "", "Four."),
    (THINK, UNDECIDED, "  Four.\n", "", "  Four.\n"),
    (THINK, UNDECIDED, "Four <think>five</think>", "", "Four <think>five</think>"),
    (THINK, UNDECIDED, "<think>a</think><think>b</think>", "a", "<think>b</think>"),
    (THINK, UNDECIDED, "<thin ice", "", "<thin ice"),
    (THINK, UNDECIDED, "<thin", "", "<thin"),
    (THINK, UNDECIDED, "", "", ""),
    (THINK, UNDECIDED, " \n", "", " \n"),
    (THINK, UNDECIDED, "<think>a < b </thin> c \n\n d </think>e", "a < b </thin> c \n\n d", "e"),
    (THINK, UNDECIDED, "<think>never ends \n", "never ends", ""),
    (THINK, UNDECIDED, "<think>never ends </thin", "never ends </thin", ""),
    (THINK, UNDECIDED, "<think>a</think>", "a", ""),
    (THINK, UNDECIDED, "<think>a</think>\n\n", "a", ""),
    # DeepSeek-R1, QwQ, Qwen 3 thinking: the prompt ends with the opening.
    (THINK, THOUGHT, "\nTwo and two.\n</think>\n\nFour. \n", "Two and two.", "Four. \n"),
    (THINK, THOUGHT, "<think>\nTwo and two.</think>Four.", "Two and two.", "Four."),
    (THINK, THOUGHT, "</think>Four.", "", "Four."),
    (THINK, THOUGHT, "cut off", "cut off", ""),
    (THINK, THOUGHT, "<thin", "<thin", ""),
    (THINK, THOUGHT, "", "", ""),
    (THINK, ANSWER, "<think>a</think>", "", "<think>a</think>"),
    (MISTRAL_THINK, UNDECIDED, "[THINK]Żółw? 🐢[/THINK]Tak, żółw 🐢.", "Żółw? 🐢", "Tak, żółw 🐢."),
    (MISTRAL_THINK, UNDECIDED, "[1, 2]", "", "[1, 2]"),
    (SEED, UNDECIDED, "<seed:think>\na\n</seed:think>b", "a", "b"),
    (GRANITE_SENTENCES, UNDECIDED, "Here is my thought process: a\nHere is my response: b", "a", "b"),
    (GRANITE_SENTENCES, UNDECIDED, "Here is my hat.", "", "Here is my hat."),
    (GRANITE_TAGS, UNDECIDED, "<think>a</think>\n<response>b</response>", "a", "b"),
    (HUNYUAN, UNDECIDED, "<think>\na\n</think>\n<answer>\nb\n</answer>", "a", "b\n"),
    (COMMAND, THOUGHT, "a<|END_THINKING|><|START_RESPONSE|>b<|END_RESPONSE|>", "a", "b"),
    (MUSE, UNDECIDED, " to=self<|message|>a<|eom|><|start|>assistant to=user<|message|>b", "a", "b"),
    (MUSE, UNDECIDED, " to=user<|message|>b to=5", "", "b to=5"),
    # Calls are for the parser of calls.
    (MUSE, UNDECIDED, " to=self<|message|>a<|eom|><|start|>assistant to=f<|message|>c", "a", "to=f<|message|>c"),
    (APERTUS, UNDECIDED, "<|inner_prefix|>a<|inner_suffix|>b", "a", "b"),
    (GEMMA_4, UNDECIDED, "<|channel>thought\na<channel|>b", "a", "b"),
    (EXAONE, THOUGHT, "\na\n</thought>\n\nb", "a", "b"),
    (KIMI, UNDECIDED, "◁think▷a◁/think▷b", "a", "b"),
    # gpt-oss: a thought is a message in the channel "analysis".
    (HARMONY, UNDECIDED, f"{ANALYSIS}a{NEXT}{FINAL}b < c", "a", "b < c"),
    (HARMONY, UNDECIDED, f"{FINAL}b", "", "b"),
    (HARMONY, UNDECIDED, "b", "", "b"),
    (HARMONY, UNDECIDED, " to=functions.f<|channel|>commentary json<|message|>{}", "", " to=functions.f\n\njson\n\n{}"),
    (
        HARMONY,
        UNDECIDED,
        f"{ANALYSIS}a{NEXT}{COMMENTARY}b{NEXT}{ANALYSIS} c {NEXT}{FINAL}d",
        "a\n\nc",
        "b\n\nd",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("thought_format", "beginning", "output", "thoughts", "answer"), CASES)
def test_an_output_is_split_at_every_border_alike(
    thought_format: ThoughtFormat, beginning: Beginning, output: str, thoughts: str, answer: str
) -> None:
    def split(pieces: Sequence[str]) -> tuple[str, str]:
        return read(ThoughtReader(thought_format, beginning), pieces)

    assert split([output]) == (thoughts, answer)
    assert split(list(output)) == (thoughts, answer)
    for first in range(len(output) + 1):
        for second in range(first, len(output) + 1):
            assert split([output[:first], output[first:second], output[second:]]) == (thoughts, answer)


def test_random_outputs_are_split_alike_whole_and_in_parts() -> None:
    draw = random.Random(13)
    words = ["a", " ", "\n", "<", "<|", "think", "</", "é", "🐢", ""]
    for thought_format in (THINK, HARMONY, GRANITE_TAGS, MISTRAL_THINK):
        alphabet = [*words, *thought_format.markers, *(marker[:-1] for marker in thought_format.markers)]
        for _ in range(300):
            pieces = draw.choices(alphabet, k=draw.randint(0, 12))
            beginning = draw.choice(list(Beginning))
            whole = read(ThoughtReader(thought_format, beginning), ["".join(pieces)])
            assert read(ThoughtReader(thought_format, beginning), pieces) == whole, (pieces, beginning)
            assert read(ThoughtReader(thought_format, beginning), list("".join(pieces))) == whole


def test_no_text_is_held_longer_than_it_may_begin_a_marker() -> None:
    reader = ThoughtReader(THINK)
    assert reader.feed("<think>") == []
    assert reader.feed("Hm") == [ThoughtPart("Hm")]
    assert reader.feed(" \n") == []
    assert reader.feed("x</") == [ThoughtPart(" \nx")]
    assert reader.feed("b") == [ThoughtPart("</b")]
    assert reader.feed("</think>\n") == []
    assert reader.feed("So") == [TextPart("So")]
    assert reader.feed(" \n<") == [TextPart(" \n<")]


@pytest.mark.parametrize(
    ("beginning", "pieces", "count"),
    [
        (UNDECIDED, ["<think>", "\n", "a", " b", "\n", "</think>", "\n\n", "c"], 4),
        (UNDECIDED, ["<th", "ink>", "a", "</", "think", ">", "c"], 1),
        (UNDECIDED, ["<think>", "a</", "think>", "c"], 1),
        (UNDECIDED, ["<think>", "a", "", "é", "</think>", "", "c"], 3),
        (UNDECIDED, ["<think>", "a", "</", "b", "</"], 4),
        (UNDECIDED, ["a", "b", "<think>"], 0),
        (THOUGHT, ["\n", "a", "</think>", "c"], 2),
        (THOUGHT, ["</think>", "c"], 0),
        (THOUGHT, ["a", "b"], 2),
        # The end token has no text.
        (THOUGHT, ["a", "b", ""], 2),
        (ANSWER, ["a", "b"], 0),
    ],
)
def test_tokens_of_thoughts_are_counted_without_markers(beginning: Beginning, pieces: list[str], count: int) -> None:
    reader = ThoughtReader(THINK, beginning)
    read(reader, pieces)
    assert reader.tokens == count


def test_long_white_space_takes_linear_time() -> None:
    reader = ThoughtReader(THINK, THOUGHT)
    pieces = ["\n"] * 100_000
    assert read(reader, [*pieces, "a</think>", *pieces, "b"]) == ("a", "b")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages[0].content }}", None),
        ("{% if m.content is string %}{{ m.content.split('</think>')[-1] }}{% endif %}", THINK),
        ("{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n' }}", THINK),
        ("{{ '[THINK]' + block.thinking + '[/THINK]' }}", MISTRAL_THINK),
        ("{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}", HARMONY),
        ("{% set begin = '<seed:think>' %}{% set end = '</seed:think>' %}", SEED),
        ('{{ \'Start with "Here is my thought process:", then "Here is my response:"\' }}', GRANITE_SENTENCES),
        ("{{ 'Thoughts between <think></think>, response between <response></response>' }}", GRANITE_TAGS),
        ("{{ '<think>\\n\\n</think>\\n' }}{{ m.content.split('<answer>')[-1] }}", HUNYUAN),
        ("{{ '<|START_THINKING|><|END_THINKING|>' }}", COMMAND),
        ("{{ '<|inner_prefix|>' }}", APERTUS),
        ("{{ '<|channel>thought\\n<channel|>' }}", GEMMA_4),
        ("{{ '<thought>\\n</thought>' }}", EXAONE),
        ("{{ '◁think▷' + t + '◁/think▷' }}", KIMI),
    ],
)
def test_formats_are_recognized_by_their_templates(template: str, expected: ThoughtFormat | None) -> None:
    assert thought_format_of(template) == expected


@pytest.mark.parametrize(
    ("prompt", "continued", "expected"),
    [
        ("[user]hi[assistant]", None, UNDECIDED),
        ("[user]hi[assistant]<think>\n", None, THOUGHT),
        ("[user]hi[assistant]<think>\n\n</think>\n\n", None, UNDECIDED),
        ("[user]hi[assistant]", "", UNDECIDED),
        ("[user]hi[assistant]Sure", "Sure", ANSWER),
        ("[user]hi[assistant]<think>Hm", "<think>Hm", THOUGHT),
        ("[user]hi[assistant]<think>Hm</think>So", "<think>Hm</think>So", ANSWER),
    ],
)
def test_the_end_of_the_prompt_tells_how_the_output_begins(
    prompt: str, continued: str | None, expected: Beginning
) -> None:
    assert beginning_after(THINK, prompt, continued) is expected


def test_no_marker_begins_with_another() -> None:
    # The reader takes the first marker that it finds.
    for thought_format in (HARMONY, THINK, GRANITE_TAGS, HUNYUAN, COMMAND):
        for one, other in pairwise(sorted(set(thought_format.markers))):
            assert not other.startswith(one)


def test_behind_an_end_by_force_thoughts_and_their_ends_are_no_answer() -> None:
    pieces = ["a", "</think>", "\n\n", "b", "<think>", "c", "</think>", "d", "</think>", "e"]
    assert read(ThoughtReader(THINK, THOUGHT, 1), pieces) == ("a\n\nc", "b\n\nd\n\ne")
    # A thought that the model ended itself: the answer may name the tags.
    assert read(ThoughtReader(THINK, THOUGHT, 2), pieces) == ("a", "b<think>c</think>d</think>e")
