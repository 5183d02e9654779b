"""What the user of `caravan run` types and sees."""

import contextlib
import sys
import termios
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import HTML
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.markup import escape
from rich.segment import Segment
from rich.text import Text

from caravan_serve.talk.commands import COMMANDS, is_whole
from caravan_serve.talk.markdown import Blocks

_REFRESHES_PER_S = 12
# The place of the flags of the terminal itself in what `tcgetattr` returns.
_INPUT_FLAGS, _LOCAL_FLAGS = 0, 3


class _Tail:
    """The end of what is still growing, as far as it fits the terminal."""

    def __init__(self, content: RenderableType) -> None:
        self._content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._content, options, pad=False)
        for line in lines[-max(1, console.size.height - 2) :]:
            yield from line
            yield Segment.line()


class _CommandCompleter(Completer):
    """Completes the names of commands."""

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """See prompt_toolkit."""
        text = document.text_before_cursor
        if not text.startswith("/") or " " in text or "\n" in text:
            return
        for name, (argument, meaning) in COMMANDS.items():
            if name.startswith(text[1:]):
                yield Completion(
                    f"/{name}", start_position=-len(text), display=f"/{name} {argument}", display_meta=meaning
                )


class Terminal:
    """Reads what the user types, and shows answers as Markdown."""

    def __init__(self, history: Path | None) -> None:
        """``history``: the file of what was typed before; None to keep none."""
        self._console = Console()
        kept: History = InMemoryHistory()
        if history is not None:
            kept = FileHistory(str(history))
        self._session: PromptSession[str] = PromptSession(
            history=kept,
            auto_suggest=AutoSuggestFromHistory(),
            completer=_CommandCompleter(),
            complete_while_typing=True,
            multiline=True,
            key_bindings=_keys(),
            prompt_continuation=lambda _width, _line, _wraps: ". ",
        )

    def read(self) -> str | None:
        """Return what the user typed; None at the end. Raises KeyboardInterrupt."""
        try:
            return self._session.prompt(HTML("<b>> </b>"))
        except EOFError:
            return None

    def show(self, parts: Iterator[tuple[str, str]]) -> str:
        """See `show`."""
        return show(self._console, parts)

    def say(self, text: str) -> None:
        """Show a text of this program."""
        self._console.print(text, markup=False, highlight=False)

    def note(self, text: str) -> None:
        """Show what has happened, beside answers."""
        self._console.print(f"[dim]{escape(text)}[/dim]", highlight=False)

    def problem(self, text: str) -> None:
        """Show what went wrong."""
        self._console.print(f"[red]{escape(text)}[/red]", highlight=False)


def _keys() -> KeyBindings:
    keys = KeyBindings()

    def accept(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_whole(buffer.text):
            buffer.validate_and_handle()
        else:
            buffer.insert_text("\n")

    def insert(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    keys.add("enter")(accept)
    keys.add("c-j")(insert)
    keys.add("escape", "enter")(insert)
    return keys


def show(console: Console, parts: Iterator[tuple[str, str]]) -> str:
    """Show the parts of an answer, each reasoning and text, as they come. Return its whole text.

    Ctrl-C ends it: what has come so far is the answer.
    """
    blocks, text, reasoning, is_interrupted = Blocks(), "", "", False
    with _without_echo(), Live(console=console, refresh_per_second=_REFRESHES_PER_S, transient=True) as live:
        try:
            for thinking, piece in parts:
                if thinking:
                    reasoning += thinking
                    live.update(_Tail(Text(reasoning, style="dim")))
                if not piece:
                    continue
                if reasoning:
                    console.print(Text(reasoning.strip(), style="dim"), "")
                    reasoning = ""
                text += piece
                for block in blocks.feed(piece):
                    console.print(Markdown(block), "")
                live.update(_Tail(Markdown(blocks.rest)))
        except KeyboardInterrupt:
            is_interrupted = True
        finally:
            live.update("")
    if reasoning:
        console.print(Text(reasoning.strip(), style="dim"))
    for block in blocks.end():
        console.print(Markdown(block), "")
    if is_interrupted:
        console.print(Text("ended", style="dim"))
    return text


@contextlib.contextmanager
def _without_echo() -> Iterator[None]:
    """Let the terminal not show what is typed, such as ^C: it would move the cursor from where `Live` has left it.

    What is typed is kept for the next prompt, key by key: a line's end would reach it as the key of a line break.
    """
    try:
        before = termios.tcgetattr(sys.stdin)
    except (OSError, ValueError, termios.error):
        # It is no terminal, or closed.
        yield
        return
    changed = [*before]
    changed[_INPUT_FLAGS] &= ~termios.ICRNL
    changed[_LOCAL_FLAGS] &= ~(termios.ECHO | termios.ICANON)
    try:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, changed)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def plain(parts: Iterator[tuple[str, str]], write: Callable[[str], object] = sys.stdout.write) -> str:
    """Write the text of an answer as it comes, without what only a terminal shows. Return it."""
    text = ""
    for _reasoning, piece in parts:
        if piece:
            text += piece
            write(piece)
            sys.stdout.flush()
    if not text.endswith("\n"):
        write("\n")
    return text
