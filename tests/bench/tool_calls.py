"""Counts the calls of tools that Caravan and llama-server read from what models of many families write.

    PYTHONPATH=tests python -m bench.tool_calls [TEMPLATE ...]

For each chat template in llama.cpp's archive, a model with this template says what the template itself makes of known
calls (see `caravan_testing.speaking_model`). Both servers get the same request, streamed, and must return the calls
that were written. Writes docs/tool_calls.json.
"""

import json
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from bench.build_peers import package_source
from bench.contenders import Common, Contender, Product
from bench.paths import ROOT, BenchError, peer
from bench.servers import serving
from caravan_dialects.chat.template_process import compiled
from caravan_dialects.chat.thought_format import thought_format_of
from caravan_dialects.chat.tool_format import pieces
from caravan_testing.speaking_model import cue, write_speaking_model

KEPT = ROOT / "docs" / "tool_calls.json"
Json = dict[str, Any]
Call = tuple[str, Json]
_TEXT = "Let me see."
# Servers have other defaults.
_OPTIONS = {"enable_thinking": False}
# Mistral's, and Kimi's, which have the name.
_IDS = ("abcdefgh{number}", "functions.{name}:{number}")
# Control tokens that end a turn with calls, and no other.
_TURN_ENDS = (
    "<|eom_id|>",
    "<|call|>",
    "<|tool_response>",
    "<|im_end|>",
    "<SPECIAL_12>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)
_NESTED = {"type": "object", "properties": {"deep": {"type": "array", "items": {"type": "integer"}}}}
_PROPERTIES = {
    "city": {"type": "string", "description": "A city"},
    "count": {"type": "integer", "description": "How many"},
    "tree": {**_NESTED, "description": "A tree"},
    "words": {"type": "array", "items": {"type": "string"}, "description": "Words"},
}
_SEARCH = {"type": "object", "properties": _PROPERTIES, "required": []}
_TOOLS = [
    {"type": "function", "function": {"name": name, "description": "A function", "parameters": parameters}}
    for name, parameters in (("search", _SEARCH), ("clock", {"type": "object", "properties": {}}))
]
CASES: Mapping[str, tuple[str, list[Call]]] = {
    "one": ("", [("search", {"city": "Paris", "count": 3})]),
    "parallel": ("", [("search", {"city": "Rome"}), ("search", {"city": "Oslo", "count": 1})]),
    "nested": ("", [("search", {"tree": {"deep": [1, 2]}, "words": ["p", "q"]})]),
    "unicode": ("", [("search", {"city": "Łódź 東京 \U0001f600"})]),
    "empty": ("", [("clock", {})]),
    "after a text": (_TEXT, [("search", {"city": "Bern"})]),
}


@dataclass(frozen=True, slots=True)
class Case:
    """What a model writes for the ``calls`` of a case, and the text before them."""

    name: str
    text: str
    calls: list[Call]
    written: str


def cases(template: str) -> list[Case]:
    """Return the cases that ``template`` can write."""
    found = []
    for name, (text, calls) in CASES.items():
        written = _written(template, text, calls)
        if written is not None:
            found.append(Case(name, text, calls, written))
    return found


def _written(template: str, text: str, calls: Sequence[Call]) -> str | None:
    """Return what the template has for a turn with ``calls``; None if it refuses, or shows them not at all."""
    question = {"role": "user", "content": "What is it?"}
    for as_text, ids, content in product((False, True), _IDS, (text, None) if not text else (text,)):
        reply = {"role": "assistant", "content": content, "tool_calls": _calls(calls, ids, as_text=as_text)}
        try:
            asked = _render(template, [question], opens=True)
            whole = _render(template, [question, reply], opens=False)
            said = _render(template, [question, {"role": "assistant", "content": "qzsaidq"}], opens=False)
        except Exception:
            continue
        written = _turn(template, asked, whole)
        if _shows(written, calls):
            written = _without_end(written, said.rpartition("qzsaidq")[2], calls)
            # Whether a model writes white space before a tag depends on how it was trained.
            bare = written.lstrip()
            return (bare if bare[:1] in "<[" else written) if text in written else None
    return None


def _shows(written: str, calls: Sequence[Call]) -> bool:
    words = [value for _, arguments in calls for value in arguments.values() if isinstance(value, str)]
    names = (name for name, _ in calls)
    return all(word in written or json.dumps(word)[1:-1] in written for word in (*words, *names))


def _without_end(written: str, turn_end: str, calls: Sequence[Call]) -> str:
    """Cut ``written`` where the turn ends, as after a text, or by a token of calls."""
    for end in (turn_end, *pieces(turn_end.strip())[:1], *_TURN_ENDS):
        cut = written.partition(end)[0] if len(end) > 1 else written
        # Some tags are within calls, too.
        written = cut if _shows(cut, calls) else written.removesuffix(end)
    return written


def _turn(template: str, asked: str, whole: str) -> str:
    """Return what ``whole`` has behind the prompt ``asked``."""
    same = next((at for at, pair in enumerate(zip(asked, whole, strict=False)) if pair[0] != pair[1]), len(asked))
    start = asked[:same]
    if start.rfind("<") > start.rfind(">"):
        # Tags that differ may begin alike.
        start = start[: start.rfind("<")]
    written = whole[len(start) :]
    thought = thought_format_of(template)
    if thought is not None and asked.rstrip().endswith(thought.opening.strip()) and thought.closing not in written:
        # The prompt opens a thought, which the history leaves out.
        written = thought.ending + written.lstrip()
    return written


def _render(template: str, messages: Sequence[Json], *, opens: bool) -> str:
    variables = {"messages": messages, "tools": _TOOLS, "documents": None, "bos_token": "", "eos_token": ""}
    return compiled(template).render(variables | _OPTIONS | {"add_generation_prompt": opens})


def _calls(calls: Sequence[Call], ids: str, *, as_text: bool) -> list[Json]:
    return [
        {
            "id": ids.format(name=name, number=number),
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments) if as_text else arguments},
        }
        for number, (name, arguments) in enumerate(calls)
    ]


def read_by(url: str, number: int) -> tuple[str, list[Call]] | str:
    """Return text and calls of the streamed answer to cue ``number``; what is wrong if there is none."""
    body = {
        "messages": [{"role": "user", "content": f"{cue(number)} What is it?"}],
        "tools": _TOOLS,
        "parallel_tool_calls": True,
        "temperature": 0,
        "stream": True,
        "max_tokens": 1000,
        "chat_template_kwargs": _OPTIONS,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    text, calls = "", dict[int, list[str]]()
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            for line in answer:
                data = line.decode().removeprefix("data:").strip()
                if not data.startswith("{"):
                    continue
                event = json.loads(data)
                if "error" in event:
                    return str(event["error"])
                for choice in event.get("choices", ()):
                    # A text before calls may be where the family has its thoughts.
                    text += choice["delta"].get("reasoning_content") or choice["delta"].get("content") or ""
                    for part in choice["delta"].get("tool_calls") or ():
                        call = calls.setdefault(part["index"], ["", ""])
                        call[0] += part["function"].get("name") or ""
                        call[1] += part["function"].get("arguments") or ""
        return text, [(name, json.loads(arguments or "{}")) for name, arguments in calls.values()]
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.read().decode()[:200]}"
    except (OSError, ValueError) as error:
        return repr(error)


def compare(template: str, folder: Path) -> dict[str, Json]:
    """Return what each server made of each case of ``template``: True, or what it read instead."""
    known = cases(template)
    if not known:
        return {}
    model = write_speaking_model(folder / "speaking.gguf", [case.written for case in known], template)
    common = Common(model=model, threads=1)
    results: dict[str, Json] = {case.name: {} for case in known}
    for server_of in Product:
        contender = Contender(name="tool-calls", product=server_of, slots=1, cells=16_384)
        try:
            with serving(contender, common) as server:
                for number, case in enumerate(known):
                    results[case.name][server_of] = _verdict(case, read_by(server.url, number))
        except BenchError as error:
            # Such as a template that the server refuses.
            for case in known:
                results[case.name].setdefault(server_of, str(error))
    return results


def _verdict(case: Case, answer: tuple[str, list[Call]] | str) -> bool | str:
    right = not isinstance(answer, str) and answer[1] == case.calls and case.text in answer[0]
    return right or f"{case.written!r} was read as {answer!r}"


def main(names: Sequence[str]) -> int:
    """Compare the templates with ``names``, or all; write what was found of them."""
    peer("llama-server")
    templates = package_source() / "vendor" / "llama.cpp" / "models" / "templates"
    kept: dict[str, dict[str, list[bool]]] = json.loads(KEPT.read_text()) if names else {}
    for path in sorted(templates.glob("*.jinja")):
        if names and path.stem not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = compare(path.read_text(), Path(folder))
        kept[path.stem] = {case: [result[by] is True for by in Product] for case, result in found.items()}
        print(
            path.stem, *(f"{by}: {sum(each[by] is True for each in found.values())} of {len(found)}" for by in Product)
        )
        for case, result in found.items():
            for by in Product:
                if result[by] is not True:
                    print(f"   {by}, {case}: {result[by]}", flush=True)
    KEPT.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
