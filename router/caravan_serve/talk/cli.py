"""The command `caravan run`: its command line, pipes, and the chat."""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from caravan.client import ApiError, BadReplyError, Client, ClientOptions, ServerConnectionError
from caravan.errors import RequestError
from caravan_models.errors import FetchError
from caravan_proto.command_line import ForeignFlags, Parser
from caravan_serve.servers import (
    ServerError,
    add_server_flags,
    add_start_flags,
    server_for,
    server_of,
    start_flags,
    state_folder,
)
from caravan_serve.talk.commands import Command, Say, Wrong, changed, help_text, parse
from caravan_serve.talk.conversation import Branches, Conversation, ConversationFileError, read, titles, written
from caravan_serve.talk.terminal import Terminal, plain

_INTERRUPTED = 130
_ERRORS = (ApiError, ServerConnectionError, BadReplyError, RequestError, TypeError, OSError)


def run_parser() -> Parser:
    """Return the parser of `caravan run`."""
    parser = Parser(
        prog="caravan run",
        usage="caravan run MODEL [PROMPT] [FLAGS]",
        description="Chat with a model in the terminal; with a prompt, or in a pipe, answer once. A running server "
        "that has the model is used, otherwise one is started that ends with the chat.",
        foreign=ForeignFlags(
            prefixed={"-hf": "hf:", "--hf-repo": "hf:"},
            renamed={"--host": "--server", "--url": "--server", "-sys": "--system", "-sp": "--system"},
            answers={
                "--verbose": "/help lists what the chat can do",
                "--temp": "pass --set temperature=0.2",
                "--temperature": "pass --set temperature=0.2",
                "--keepalive": "leave it out: a server that runs keeps its models",
                "--nowordwrap": "leave it out: in a pipe, no line is wrapped",
            },
        ),
    )
    parser.add_argument("words", nargs="*", metavar="MODEL", help="a known name, hf:OWNER/REPOSITORY or a GGUF file")
    parser.add_argument("-m", "--model", metavar="MODEL", help="the same as a flag")
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt as a flag")
    parser.add_argument("--system", metavar="TEXT", default="", help="the system message")
    parser.add_argument("--image", metavar="FILE", action="append", default=[], type=Path, help="an image; repeatable")
    parser.add_argument(
        "--set", metavar="NAME=VALUE", action="append", default=[], help="a sampling parameter; repeatable"
    )
    parser.add_argument("--load", metavar="FILE", type=Path, help="continue the conversation that /save wrote")
    add_server_flags(parser)
    add_start_flags(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Chat, or answer once. Return 0, 1 if that was not possible, 130 after Ctrl-C."""
    parser = run_parser()
    arguments = parser.parse_models(argv)
    words: list[str] = [*([arguments.model] if arguments.model else []), *arguments.words]
    given = server_of(arguments.server, arguments.api_key, os.environ)
    if not words and not given[1]:
        parser.error("name a model, such as caravan run smollm2; caravan list --known lists short names")
    model, prompt = (words[0], " ".join(words[1:])) if words else ("", "")
    prompt = arguments.prompt or prompt
    conversation = _begun(parser, arguments.system, arguments.image, arguments.set, arguments.load)
    # Conversations share one pool of cells, so that a single one may have all.
    flags = ["--parallel=4", "--kv-layout=unified", *start_flags(parser, arguments)]
    piped = "" if sys.stdin.isatty() else sys.stdin.read()
    text = "\n\n".join(part for part in (prompt, piped.strip("\n")) if part)
    if not text and not sys.stdin.isatty():
        parser.error("standard input is empty, and there is no prompt")
    try:
        with server_for(model, given, flags) as (server, name, _):
            options = ClientOptions(model=name)
            if server.api_key:
                options["api_key"] = server.api_key
            with Client(server.url, **options) as client:
                if text:
                    return _answer_once(client, conversation, text)
                return _chat(client, name, Branches([conversation]))
    except (ServerError, FetchError) as error:
        sys.stderr.write(f"caravan run: error: {error}\n")
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED


def _begun(
    parser: Parser, system: str, images: Sequence[Path], settings: Sequence[str], file: Path | None
) -> Conversation:
    """Return the conversation with which the chat begins, or end the program."""
    conversation = Conversation()
    try:
        if file is not None:
            conversation = read(file.read_bytes())
    except (OSError, ConversationFileError) as error:
        parser.error(f"--load {file}: {getattr(error, 'strerror', None) or error}")
    for setting in settings:
        found = changed(conversation.settings, setting)
        if isinstance(found, str):
            parser.error(f"--set {setting}: {found}")
        conversation = replace(conversation, settings=found)
    for image in images:
        if not image.is_file():
            parser.error(f"--image {image}: there is no such file")
    return replace(conversation, system=system or conversation.system, images=tuple(images))


def _parts(client: Client, conversation: Conversation) -> Iterator[tuple[str, str]]:
    """Yield the parts of the answer, reasoning and text. Raises one of _ERRORS."""
    for output in client.stream_chat(conversation.prompt, conversation.params):
        yield from ((part.reasoning, part.text) for part in output.outputs)


def _answer_once(client: Client, conversation: Conversation, text: str) -> int:
    try:
        parts = _parts(client, conversation.asked(text))
        if sys.stdout.isatty():
            Terminal(None).show(parts)
        else:
            plain(parts)
    except BrokenPipeError:
        raise
    except _ERRORS as error:
        sys.stderr.write(f"caravan run: error: {error}\n")
        return 1
    return 0


def _chat(client: Client, model: str, branches: Branches) -> int:
    folder = state_folder(os.environ)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    terminal = Terminal(folder / "run-history")
    terminal.note(f"{model}; /help lists the commands, /bye or Ctrl-D ends")
    chat = _Chat(client, model, branches, terminal, folder)
    while not chat.has_ended:
        try:
            text = terminal.read()
        except KeyboardInterrupt:
            terminal.note("/bye or Ctrl-D ends")
            continue
        if text is None:
            return 0
        try:
            chat.do(text)
        except KeyboardInterrupt:
            # Between the line and its answer.
            terminal.note("ended; /retry asks again")
    return 0


class _Chat:
    """Carries out what the user types."""

    def __init__(self, client: Client, model: str, branches: Branches, terminal: Terminal, folder: Path) -> None:
        self._client = client
        self._model = model
        self._branches = branches
        self._terminal = terminal
        self._folder = folder
        self.has_ended = False

    def do(self, text: str) -> None:
        """Answer ``text``, or carry out the command that it is."""
        match parse(text):
            case None:
                return
            case Wrong(why):
                self._terminal.problem(why)
            case Say(words):
                self._say(words)
            case Command(name, argument):
                {
                    "retry": self._retry,
                    "fork": self._fork,
                    "save": self._save,
                    "load": self._load,
                    "set": self._set,
                    "image": self._image,
                    "system": self._system,
                    "help": self._help,
                    "bye": self._bye,
                }[name](argument)

    @property
    def _now(self) -> Conversation:
        return self._branches.conversation

    @_now.setter
    def _now(self, value: Conversation) -> None:
        self._branches.conversation = value

    def _say(self, words: str) -> None:
        try:
            self._now = self._now.asked(words)
        except (RequestError, OSError) as error:
            self._terminal.problem(str(error))
            return
        self._answer()

    def _answer(self) -> None:
        try:
            self._now = self._now.answered(self._terminal.show(_parts(self._client, self._now)))
        except _ERRORS as error:
            self._terminal.problem(f"{error}; /retry asks again")

    def _retry(self, _argument: str) -> None:
        again = self._now.without_answer()
        if again is None:
            self._terminal.problem("there is no message to answer again")
            return
        self._now = again
        self._answer()

    def _fork(self, argument: str) -> None:
        if not argument:
            self._branches.fork()
        elif problem := self._branches.go_to(argument):
            self._terminal.problem(problem)
            return
        for number, title in enumerate(titles(self._branches.kept), 1):
            self._terminal.note(f"{'*' if number == self._branches.current else ' '} {number}  {title}")

    def _save(self, argument: str) -> None:
        file = Path(argument).expanduser() if argument else self._folder / time.strftime("chat-%Y%m%d-%H%M%S.json")
        try:
            file.write_bytes(written(self._now, self._model))
        except OSError as error:
            self._terminal.problem(f"cannot write {file}: {error.strerror}")
            return
        self._terminal.note(f"saved to {file}")

    def _load(self, argument: str) -> None:
        file = Path(argument).expanduser()
        try:
            self._now = read(file.read_bytes())
        except (OSError, ConversationFileError) as error:
            self._terminal.problem(f"cannot load {file}: {getattr(error, 'strerror', None) or error}")
            return
        [title] = titles([self._now])
        self._terminal.note(f"loaded {title}")

    def _set(self, argument: str) -> None:
        if not argument:
            shown = ", ".join(f"{name} {value}" for name, value in self._now.settings.items())
            self._terminal.note(shown or "no parameter is set; the server's defaults hold")
            return
        found = changed(self._now.settings, argument)
        if isinstance(found, str):
            self._terminal.problem(found)
            return
        self._now = replace(self._now, settings=found)

    def _image(self, argument: str) -> None:
        file = Path(argument.strip("'\"")).expanduser()
        if not file.is_file():
            self._terminal.problem(f"there is no file {file}")
            return
        self._now = replace(self._now, images=(*self._now.images, file))
        self._terminal.note(f"{file.name} goes with the next message")

    def _system(self, argument: str) -> None:
        self._now = replace(self._now, system=argument)
        self._terminal.note("the system message is set" if argument else "no system message")

    def _help(self, _argument: str) -> None:
        self._terminal.say(help_text())

    def _bye(self, _argument: str) -> None:
        self.has_ended = True
