"""The words that texts for users avoid. `make lint` runs this module, which lists every place that has one.

Read are the documents, CHANGELOG.md, the strings of the programs (help texts, log lines, errors), the descriptions of
the HTTP API, the page, the docstrings of the Python package, and the comments and notes in `deploy/`. Code in
documents, names and addresses are no words.
"""

import ast
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Avoided(NamedTuple):
    """A pattern of words, and what to write instead."""

    pattern: re.Pattern[str]
    instead: str


def _avoided(words: str, instead: str) -> Avoided:
    return Avoided(re.compile(rf"(?<![\w./-])(?:{words})(?![\w(])", re.IGNORECASE), instead)


# What may follow "behind": software and hardware that requests pass through.
_FRONTS = (
    r"(?:a|an|the|one|its)?\s*(?:[\w-]+[\s-]+)?(?:nginx|prox(?:y|ies)|load balancers?|Ingress|Gateway|feature gate)"
)
AVOIDED = (
    _avoided(r"tells?|telling|told", "report, describe, say, distinguish"),
    _avoided(
        r"(?:all|any|anything|everything|none|no \w+|nothing|those|these|\w+,?)\s+but\s+(?:for|those|of)", "except"
    ),
    _avoided(r"(?:nothing|none|anything|no one)\s+but", "only"),
    _avoided(r"nobody", "no one, none, or a passive"),
    _avoided(
        r"(?<!at )most\s+(?:[KMG]iB|bytes|seconds|milliseconds|tokens that|\w+ of (?:a|one|any) )", "maximum, limit"
    ),
    _avoided(rf"behind(?!\s+{_FRONTS})", "after"),
    _avoided(r"company|companies", "batch, other requests; organization"),
    _avoided(r"thoughts?", "reasoning"),
    _avoided(r"(?:so|as|too)\s+many\s+(?:at\s+a\s+time|of\s+them)|(?<!not )so\s+many", "a number, that many"),
    _avoided(r"pictures?", "image"),
    _avoided(r"sounds?", "audio"),
    _avoided(r"draws?|drawn|drawing(?! room)", "sample; show"),
    _avoided(r"calls?\s+of\s+(?:a\s+|the\s+|its\s+)?(?:tools?|functions?)", "tool call"),
    _avoided(r"(?<!take )(?<!takes )in\s+turns?", "alternately, one after another"),
    _avoided(r"hears?|heard", "read audio; receive"),
    _avoided(r"models?\s+(?:that|does\s+not|neither)\s+sees?", "read images, multimodal"),
    _avoided(r"writes?\s+down|written\s+down", "transcribe, record"),
    _avoided(r"what\s+lacks?|that\s+lacks?\s+in", "what is missing"),
    _avoided(r"is\s+no\s+matter|no\s+matter\s+(?:how|what|which)", "does not matter, whatever"),
    _avoided(r"of\s+(?:its|their|one's|our|his)\s+own", "its own, separate"),
    _avoided(r"who(?:so)?ever|nought|lest|thereby|wherefrom|hitherto|of late", "plain words"),
    _avoided(r"made\s+models?", "derived model"),
    _avoided(r"stays?\s+so", "stay as it is"),
    _avoided(r"(?<=\.\s)(?-i:Of)(?=\s(?!course))", "a sentence with a subject"),
)
# Where such a word is right: the file, and the words around it.
RIGHT: dict[str, tuple[str, ...]] = {
    "examples/fork_tones.py": ("writing to tell you",),  # A letter.
    "router/caravan_dialects/chat/thought_format.py": ("Here is my thought process",),  # What Granite writes.
    "router/caravan_dialects/chat/tool_prompt.py": ("answer with nothing but a JSON object",),  # For models.
}
# Words that prompts are made of.
_SKIPPED = ("router/caravan_serve/bench/workloads.py",)

_CODE = re.compile(
    r"^( *)```.*?^\1```|(`+)(?!`).+?(?<!`)\2(?!`)|(?<=\])\([^)\s]+\)|<!--.*?-->", re.DOTALL | re.MULTILINE
)
_URL = re.compile(r"https?://\S+")
# A comment, or a string in quotation marks; what begins first ends first.
_JS_TOKEN = re.compile(
    r"/\*.*?\*/|//[^\n]*|(?P<quote>[\"'])(?P<quoted>(?:[^\\\n]|\\.)*?)(?P=quote)|`(?P<template>(?:[^`\\]|\\.)*)`",
    re.DOTALL,
)
_JS_VALUE = re.compile(r"\$\{[^}]*\}")
_TAG = re.compile(
    r"<(?:style|script).*?</(?:style|script)>|<!--.*?-->|(?<=[\s\"])(?:class|id|for|name|href|src|type)=\"[^\"]*\"|</?[\w-]+",
    re.DOTALL,
)
_PACKAGES = ("caravan", "models", "proto/caravan_proto", "router", "shard")


class Text(NamedTuple):
    """Words for users, of a file from ``line`` on."""

    path: str
    line: int
    words: str


def markdown(text: str) -> str:
    """The prose of a document, with as many lines."""
    return _URL.sub("", _CODE.sub(lambda code: "\n" * code[0].count("\n") or "x", text))


def page_script(text: str) -> str:
    """The strings of a script that are words, with as many lines."""
    kept, end = [], 0
    for token in _JS_TOKEN.finditer(text):
        words = _JS_VALUE.sub("x", token["quoted"] or token["template"] or "")
        is_class = text.endswith("class: ", 0, token.start())
        is_words = not is_class and (" " in words.strip() or words[:1].isupper())
        lines = "\n" * text.count("\n", end, token.end())
        kept.append(f"{words} {lines}" if is_words else lines)
        end = token.end()
    return "".join(kept)


def page_markup(text: str) -> str:
    """What a page shows and names, with as many lines."""
    return _TAG.sub(lambda tag: "\n" * tag[0].count("\n"), text)


def python_strings(text: str, with_docstrings: bool) -> Iterator[tuple[int, str]]:
    """The strings of a module that have several words, each with its line; docstrings only if they are asked for."""
    tree = ast.parse(text)
    docstrings = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or " " not in node.value.strip():
            continue
        if id(node) not in docstrings or with_docstrings:
            yield node.lineno, markdown(node.value.replace("``", "`"))


def _descriptions(value: Any) -> Iterator[str]:
    """Every description of an OpenAPI document or a JSON schema."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in ("description", "summary") and isinstance(inner, str):
                yield inner
            else:
                yield from _descriptions(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _descriptions(inner)


def texts() -> Iterator[Text]:
    """Everything that users read."""
    for pattern, reader in _PROSE:
        for path in sorted(ROOT.glob(pattern)):
            yield Text(str(path.relative_to(ROOT)), 1, reader(path.read_text()))
    for name in ("router/caravan_router/http/openapi.json", "deploy/helm/caravan/values.schema.json"):
        text = (ROOT / name).read_text()
        for description in _descriptions(json.loads(text)):
            line = 1 + text.count("\n", 0, text.find(json.dumps(description, ensure_ascii=False)))
            yield Text(name, line, markdown(description.replace("``", "`")))
    for package in _PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if str(path.relative_to(ROOT)) in _SKIPPED:
                continue
            for line, words in python_strings(path.read_text(), with_docstrings=package == "caravan"):
                yield Text(str(path.relative_to(ROOT)), line, words)


_PROSE: tuple[tuple[str, Callable[[str], str]], ...] = (
    ("*.md", markdown),
    ("docs/**/*.md", markdown),
    ("examples/*.py", str),
    ("router/caravan_studio/page/[!v]*/*.js", page_script),
    ("router/caravan_studio/page/*.html", page_markup),
    ("compose.yaml", str),
    ("deploy/compose/*.yaml", str),
    ("deploy/helm/caravan/*.md", markdown),
    ("deploy/helm/caravan/*.yaml", str),
    ("deploy/helm/caravan/files/*.yaml", str),
    ("deploy/helm/caravan/templates/NOTES.txt", str),
    ("deploy/helm/caravan/templates/_checks.tpl", str),
    ("deploy/nginx/*", str),
    ("deploy/systemd/*", str),
)


def found(text: Text) -> Iterator[str]:
    """One line for each avoided word of a text: where it stands, and what to write instead."""
    for pattern, instead in AVOIDED:
        for match in pattern.finditer(text.words):
            around = " ".join(text.words[max(match.start() - 40, 0) : match.end() + 40].split())
            if not any(right in around for right in RIGHT.get(text.path, ())):
                line = text.line + text.words.count("\n", 0, match.start())
                yield f"{text.path}:{line}: {' '.join(match[0].split())!r} (write: {instead}) in: {around}"


def main() -> int:
    """Print what is found; 1 if there is anything."""
    lines = [line for text in texts() for line in found(text)]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
