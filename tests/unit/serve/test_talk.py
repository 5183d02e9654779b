"""What a line of the user is, how a conversation changes, and how streamed Markdown becomes blocks."""

import dataclasses
import fcntl
import io
import os
import pty
import struct
import termios
import tty
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from caravan.sampling_params import StructuredOutputsParams
from caravan_serve.talk.commands import COMMANDS, Command, Line, Say, Wrong, changed, help_text, is_whole, parse
from caravan_serve.talk.conversation import Branches, Conversation, ConversationFileError, read, titles, written
from caravan_serve.talk.markdown import Blocks
from caravan_serve.talk.terminal import show
from caravan_testing.waiting import wait_until


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", None),
        (" \n ", None),
        ("hello", Say("hello")),
        (" a\nb ", Say("a\nb")),
        ("a\\\nb", Say("a\nb")),
        ('"""\na\n\n/b\n"""', Say("a\n\n/b")),
        ('""""""', None),
        ("//etc/passwd", Say("/etc/passwd")),
        ("/retry", Command("retry")),
        ("/RETRY ", Command("retry")),
        ("/regenerate", Command("retry")),
        ("/exit", Command("bye")),
        ("/?", Command("help")),
        ("/fork 2", Command("fork", "2")),
        ("/system be kind, please", Command("system", "be kind, please")),
        ("/save my chat.json", Command("save", "my chat.json")),
        ("/load", Wrong("/load needs FILE")),
        ("/image ", Wrong("/image needs FILE")),
        ("/retyr", Wrong("there is no command /retyr; did you mean /retry?")),
        ("/quitt", Wrong("there is no command /quitt; did you mean /bye?")),
        ("/zzz", Wrong("there is no command /zzz; /help lists the commands")),
    ],
)
def test_a_line_is_words_or_a_command(text: str, line: Line | None) -> None:
    assert parse(text) == line


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("a", True),
        ("a\\", False),
        ("a\\\nb", True),
        ('"""', False),
        ('"""a\nb', False),
        ('"""a\nb\n"""', True),
        ('"""a"""', True),
        ('a """', True),
    ],
)
def test_enter_sends_what_is_whole(text: str, whole: bool) -> None:
    assert is_whole(text) is whole


def test_help_has_each_command() -> None:
    assert all(f"/{name} " in help_text() for name in COMMANDS)


@pytest.mark.parametrize(
    ("argument", "settings"),
    [
        ("temperature 0.2", {"seed": 1, "temperature": 0.2}),
        ("temperature=0.2", {"seed": 1, "temperature": 0.2}),
        ("max-tokens 10", {"seed": 1, "max_tokens": 10}),
        ('stop ["a", "b"]', {"seed": 1, "stop": ["a", "b"]}),
        ("stop END", {"seed": 1, "stop": "END"}),
        ("seed off", {}),
        ("top_k off", {"seed": 1}),
        ('structured_outputs={"regex": "a+"}', {"seed": 1, "structured_outputs": {"regex": "a+"}}),
        ("temperatur 1", "there is no parameter temperatur; did you mean temperature?"),
        ("temperature hot", "temperature must be a number, such as 1. Given: hot"),
        ("temperature", "/set temperature needs a value, such as 1; off resets it"),
        (
            'structured_outputs {"rule": "a+"}',
            'structured_outputs must be a JSON object, such as {"regex": "[a-z]+"}. Given: {"rule": "a+"}',
        ),
        ("structured_outputs a+", 'structured_outputs must be a JSON object, such as {"regex": "[a-z]+"}. Given: a+'),
        ("n 2", "there is no parameter n; such as temperature and top_p"),
    ],
)
def test_settings_change(argument: str, settings: dict[str, Any] | str) -> None:
    assert changed({"seed": 1}, argument) == settings


def test_a_conversation_grows_and_loses_its_last_answer() -> None:
    begun = Conversation(system="s")
    assert begun.without_answer() is None
    asked = begun.asked("a")
    answered = asked.answered("b")
    assert answered.prompt == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]
    assert answered.without_answer() == asked
    assert asked.without_answer() == asked


def test_images_go_with_the_next_message_alone(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(b"\x89PNG\r\n\x1a\n")
    asked = dataclasses.replace(Conversation(), images=(file,)).asked("what?")
    [message] = asked.messages
    assert [part["type"] for part in message["content"]] == ["image_url", "text"]
    assert asked.images == ()
    assert asked.asked("and?").messages[1]["content"] == "and?"
    assert titles([asked]) == ["1 messages: what?"]


def test_a_file_keeps_a_conversation() -> None:
    settings = {"seed": 3, "structured_outputs": {"choice": ["b", "c"]}}
    kept = dataclasses.replace(Conversation(system="s", settings=settings).asked("a").answered("b"))
    assert read(written(kept, "toy")) == kept
    assert read(written(kept, "toy")).params.structured_outputs == StructuredOutputsParams(choice=["b", "c"])


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"x", "it is no saved conversation"),
        (b"{}", "it is no saved conversation"),
        (b'{"messages": [{"role": "user"}]}', r"messages\[0\] has no role or no content"),
        (b'{"messages": [], "settings": {"heat": 1}}', "settings cannot be used: unknown options: heat"),
        (b'{"messages": [], "settings": {"structured_outputs": {"rule": "a"}}}', "unknown options: rule"),
    ],
)
def test_a_file_that_holds_none_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(ConversationFileError, match=why):
        read(data)


def test_branches_go_on_from_a_copy() -> None:
    branches = Branches()
    branches.conversation = branches.conversation.asked("a").answered("b")
    branches.fork()
    branches.conversation = branches.conversation.asked("c")
    assert titles(branches.kept) == ["2 messages: a", "3 messages: c"]
    assert branches.go_to("1") == ""
    assert len(branches.conversation.messages) == 2
    for number in ("0", "3", "x", "-1"):
        assert branches.go_to(number) == f"there are conversations 1 to 2. Given: {number}"
    assert branches.current == 1


STEPS = "1. one\n\n   ```sh\n   a\n\n   b\n   ```\n\n2. two"
BLOCKS = [
    ("a", ["a"]),
    ("a\n\nb", ["a", "b"]),
    ("a\nb\n\n\nc\n", ["a\nb", "c"]),
    ("# A\n\n- x\n- y\n\nend", ["# A", "- x\n- y", "end"]),
    ("- x\n\n- y\n\n  more\n\nend", ["- x\n\n- y\n\n  more", "end"]),
    (STEPS, [STEPS]),
    ("```\na\n\nb\n```\n\nc", ["```\na\n\nb\n```", "c"]),
    ("````\n```\n\n```\n````\n\nc", ["````\n```\n\n```\n````", "c"]),
    ("~~~\na\n\n```\n", ["~~~\na\n\n```"]),
    ("| a |\n|---|\n| 1 |\n\nb", ["| a |\n|---|\n| 1 |", "b"]),
    ("\n\n", []),
]


def blocks_of(pieces: list[str]) -> list[str]:
    blocks = Blocks()
    found = [block for piece in pieces for block in blocks.feed(piece)]
    return [*found, *blocks.end()]


@pytest.mark.parametrize(("text", "found"), BLOCKS)
def test_a_block_ends_where_it_can_change_no_more(text: str, found: list[str]) -> None:
    assert blocks_of([text]) == found
    assert blocks_of(list(text)) == found


def test_the_rest_is_what_has_not_ended() -> None:
    blocks = Blocks()
    assert blocks.feed("a\n\nb") == []
    assert blocks.rest == "a\n\nb"
    assert blocks.feed("c\n") == ["a"]
    assert blocks.rest == "bc"
    assert blocks.end() == ["bc"]
    assert blocks.rest == ""


@given(st.lists(st.text(alphabet="ab \n-`1."), max_size=20))
def test_pieces_do_not_matter_and_no_word_is_lost(pieces: list[str]) -> None:
    text = "".join(pieces)
    found = blocks_of(pieces)
    assert found == blocks_of([text])
    assert "".join(found).split() == text.split() or "".join("".join(found).split()) == "".join(text.split())


def shown(*parts: tuple[str, str], interrupted: bool = False) -> tuple[str, list[str]]:
    """Return the answer, and the lines that are on the terminal at last."""

    def coming() -> Iterator[tuple[str, str]]:
        yield from parts
        if interrupted:
            raise KeyboardInterrupt

    file = io.StringIO()
    text = show(Console(file=file, width=40), coming())
    return text, [line.strip() for line in file.getvalue().splitlines() if line.strip()]


def test_an_answer_is_shown_as_markdown_after_its_reasoning() -> None:
    parts = [("I th", ""), ("ink", ""), ("", "1. on"), ("", "e\n\n   more\n\n2. two"), ("", "\n\nend")]
    text, lines = shown(*parts)
    assert text == "1. one\n\n   more\n\n2. two\n\nend"
    assert lines[0] == "I think"
    assert lines[-1] == "end"
    assert [line.split()[0] for line in lines if line[0].isdigit()] == ["1", "2"]


def test_an_answer_that_is_ended_is_what_has_come() -> None:
    assert shown(("", "half an"), interrupted=True) == ("half an", ["half an", "ended"])
    assert shown(("I think", ""), interrupted=True) == ("", ["I think", "ended"])


def test_what_is_typed_during_an_answer_is_kept_for_the_next_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    controller, terminal = pty.openpty()
    with open(controller, "r+b", buffering=0) as keys, open(terminal, "rb", buffering=0) as typed:
        monkeypatch.setattr("sys.stdin", typed)
        four = struct.pack("i", 4)

        def parts() -> Iterator[tuple[str, str]]:
            keys.write(b"a\rb\r")
            # The kernel passes keys on later, under the settings of that time.
            wait_until(lambda: fcntl.ioctl(terminal, termios.FIONREAD, bytes(4)), "four keys", four.__eq__)
            yield "", "An answer"

        show(Console(file=io.StringIO()), parts())
        tty.setraw(terminal, termios.TCSANOW)  # as the next prompt does
        os.set_blocking(terminal, False)
        assert typed.read(10) == b"a\rb\r"
