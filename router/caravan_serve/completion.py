"""The command `caravan completion`: scripts for bash, zsh and fish, made from the parsers of all commands."""

import argparse
import sys
from collections.abc import Iterator, Sequence

from caravan_models.reference import known_models
from caravan_proto.command_line import Parser
from caravan_serve.agents import AGENTS

# Commands whose arguments are models.
_OF_MODELS = frozenset({"run", "serve", "pull", "show", "rm", "stop"})


def completion_parser() -> Parser:
    """Return the parser of `caravan completion`."""
    parser = Parser(prog="caravan completion", description="Print the completion of a shell.")
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="bash, zsh: source <(caravan completion bash)")
    return parser


def main(argv: Sequence[str]) -> int:
    """Print a script. Return 0."""
    # Here, since the table of commands names this module.
    from caravan_serve.commands import COMMANDS, function_of

    shell: str = completion_parser().parse_args(argv).shell
    words: dict[str, list[str]] = {}
    for name, command in COMMANDS.items():
        try:
            words[name] = sorted(words_of(name, function_of(command.parser)()))
        except ModuleNotFoundError:
            # Its extra is not installed, so that it can be named only.
            words[name] = []
    summaries = {name: command.summary.partition(":")[0] for name, command in COMMANDS.items()}
    sys.stdout.write(fish_script(words, summaries) if shell == "fish" else bash_script(words, shell))
    return 0


def words_of(command: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield what may follow ``command``: long flags, short names of models, and words of which one is an argument."""
    for action in parser._actions:
        yield from (name for name in action.option_strings if name.startswith("--"))
        if not action.option_strings and action.choices:
            yield from action.choices
    if command in _OF_MODELS:
        yield from known_models()
    if command == "launch":
        yield from AGENTS


def bash_script(words: dict[str, list[str]], shell: str) -> str:
    """Return a script for bash, and for zsh with its emulation of bash's completion."""
    cases = "".join(f'    {name}) words="{" ".join(own)}" ;;\n' for name, own in words.items())
    start = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    return f"""{start}_caravan() {{
  local line=${{COMP_LINE:0:COMP_POINT}} words
  local word=${{line##* }}
  case ${{COMP_CWORD}}:${{COMP_WORDS[1]}} in
    1:*) words="{" ".join(words)} --help --version" ;;
    *) case ${{COMP_WORDS[1]}} in
{cases}    esac ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  # A colon ends a word, so that only what follows it is replaced.
  case $COMP_WORDBREAKS in
    *:*) COMPREPLY=("${{COMPREPLY[@]#"${{word%"${{word##*:}}"}}"}}") ;;
  esac
}}
complete -o default -o nosort -F _caravan caravan
""".replace(" -o nosort" if shell == "zsh" else "\0", "")


def fish_script(words: dict[str, list[str]], summaries: dict[str, str]) -> str:
    """Return a script for fish."""
    lines = [
        f"complete -c caravan -n __fish_use_subcommand -f -a {name} -d {_quoted(summary)}"
        for name, summary in summaries.items()
    ]
    for name, own in words.items():
        seen = f"complete -c caravan -n '__fish_seen_subcommand_from {name}'"
        lines += [f"{seen} -l {word[2:]}" if word.startswith("--") else f"{seen} -a {_quoted(word)}" for word in own]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
