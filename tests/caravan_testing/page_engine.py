"""A scripted engine for tests of the page: what it says follows from the last message of the user."""

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from caravan_proto.messages.model import TokenizedText
from caravan_proto.messages.results import FinishReason
from caravan_scheduler.core.engine import ModelFacts
from caravan_scheduler.core.generation import GenerationSpec
from caravan_scheduler.core.tokens import Alternative
from caravan_testing.scripted_engine import BOS, EOS, EOS_TOKEN, MODEL, Pause, ScriptedEngine, Step, word

# Shows earlier thoughts and tools as Qwen's templates do.
_TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools><tool_call>{% endif %}{% for m in messages %}<|im_start|>"
    "{{ m.role }}\n{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CHAT = replace(
    MODEL, vocabulary_size=10_000, chat_template=_TEMPLATE, max_sequence_tokens=100_000, max_tokenize_bytes=1_000_000
)

# Characters have lower ids.
_FIRST_PIECE = 1000
WAITING = ("one", " two", " three")
RICH = """# Rivers

Some *text* with `code` and a [link](https://example.com/).

```python
print("hello")
```

| river | length |
|---|---|
| Elbe | 1094 |
"""
WRITTEN = r"""1. one

   ```python
   def f(x):
       return "text"  # why
   ```

2. two

then

5. five

- [x] done
- [ ] open

| name | number |
|:-----|-------:|
| a<br>b | H<sub>2</sub>O |

<details>
<summary>More</summary>

Folded *text*.

</details>

Costs $5, not $6. \(a_1^2 + b_1^2\) and $x_1$ and `$y$` and [bad](javascript:alert(1)) <b onclick=x>raw</b>.

\[
\frac{1}{2}
- y
\]

\[\sum_{k=1}^{n} k^2 = \text{a formula that is much wider than the screen of a phone} + \text{and more words}\]
"""
HOSTILE = (
    "<script>window.ran = 1</script><img src=x onerror='window.ran = 2'><iframe src='https://evil.example/'></iframe>\n\n"
    "![pixel](https://evil.example/pixel.png?stolen) [click](javascript:window.ran=3) [data](data:text/html,x)\n\n"
    "<svg onload=window.ran=4></svg><style>body { display: none }</style><form action='https://evil.example'><input>"
    "<button style='position:fixed;inset:0'>x</button></form><a href='https://evil.example' style='inset:0'>a</a>\n\n"
    r"$\href{javascript:window.ran=5}{x}$ $\includegraphics{https://evil.example/y.png}$ \(\def\a{\a\a}\a\) "
    r"\(\rule{9000em}{9000em}\) $\class{skip}{x} \style{inset:0}{y}$" + "\n\n"
    "\u202eright to left\u202d and back \u2067isolated\n\n"
    "|"
    + "wide column|" * 60
    + "\n|"
    + "---|" * 60
    + "\n|"
    + "x" * 40
    + "|\n\n"
    + "```\n"
    + "y" * 3000
    + "\n```\n\n"
    + "z" * 3000
)
THOUGHT = "They want a number."
CALL = {"name": "weather", "arguments": {"city": "Oslo"}}


@dataclass
class PageEngine(ScriptedEngine):
    """Says what the words "wait", "rich", "written", "hostile", "think" or "weather" ask for; else repeats."""

    model: ModelFacts = _CHAT
    # The tokens of what was said, which have more than a character.
    pieces: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.script = self._say
        self.cached_tokens = lambda spec: len(spec.prompt) // 2

    def _say(self, spec: GenerationSpec) -> Sequence[Step]:
        prompt = "".join(map(self._text, spec.prompt))
        if spec.stopping.max_new_tokens == 1 and spec.prompt_logprobs:
            return [word("x", finish=FinishReason.LENGTH, logprob=-1.0)]
        asked, _, begun = prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")
        if begun.endswith("".join(WAITING)):
            return self._words(" four", " five")
        match asked.strip():
            case "wait":
                return [*self._words(*WAITING)[:-1], Pause(), word(" never")]
            case "rich":
                return self._words(*_pieces(RICH))
            case "written":
                return self._words(*_pieces(WRITTEN))
            case "hostile":
                return self._words(*_pieces(HOSTILE, 40))
            case "think":
                return self._words(*_pieces(f"<think>\n{THOUGHT}\n</think>\n\nIt is 4."))
            case "weather" if "<tool_response>" not in begun and "role" not in begun and "tool\n" not in begun:
                return self._words(*_pieces(f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>"))
            case _:
                return self._words("You", " said", f" **{asked[:60]}**.", likely=spec.sampling.logprobs)

    def _words(self, *pieces: str, likely: bool = False) -> list[Step]:
        """Return tokens and the end. ``likely``: with log probabilities."""
        others = [Alternative(20, b"maybe", False, -2.0)] if likely else []
        logprob = -0.5 if likely else None
        ids = [self.pieces.setdefault(piece, _FIRST_PIECE + len(self.pieces)) for piece in pieces]
        said = [
            word(piece, token_id, logprob=logprob, alternatives=others)
            for piece, token_id in zip(pieces, ids, strict=True)
        ]
        return [*said, EOS_TOKEN]

    def _text(self, token_id: int) -> str:
        said = {known: piece for piece, known in self.pieces.items()} | {BOS: "<s>", EOS: "</s>"}
        return said.get(token_id) or chr((token_id - 100) % 800)

    async def detokenize(self, token_ids: Sequence[int]) -> TokenizedText:
        pieces = tuple(self._text(token_id).encode() for token_id in token_ids)
        return TokenizedText(tuple(token_ids), pieces, tuple(token_id in (BOS, EOS) for token_id in token_ids))


def _pieces(text: str, size: int = 5) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


def write_recording(path: Path) -> Path:
    """Write a recording that was cut off, as when the router is killed, after it had ended."""
    lines = [json.dumps({"page": message}, separators=(",", ":")) for message in _messages()]
    path.write_bytes(
        gzip.compress("\n".join([*lines, '{"ended":"its space was full"}', '{"event":"for replays"}', ""]).encode())[
            :-10
        ]
    )
    return path


def _messages() -> list[dict[str, Any]]:
    shard = {
        "shard": "a",
        "draining": False,
        "layout": "unified",
        "sequences": 2,
        "max_sequences": 4,
        "cells": 1000,
        "used": 300,
        "cached": 100,
        "step_s": 0.02,
        "memory": [500, 1000],
        "disk": [0, 0],
        "running": [],
        "more_cells": 0,
        "map": [[-1, 200, [], []], [0, 60, [1], []], [0, 40, [2], []], [-1, 100, [], [7]]],
        "runs": [[0, 100, 500, "memory", -1, False]],
        "more_runs": 0,
    }
    waiting = {
        "request": 3,
        "reason": "prefix",
        "arrived": 101.0,
        "tokens": 812,
        "priority": 0,
        "key": "key-1",
        "of": 1,
        "shard": "",
        "saved_on": "",
        "started": False,
    }
    figures = {
        "window_s": 60,
        "tokens_s": 42.0,
        "prompt_tokens_s": 100.0,
        "ttft_s": [0.25, 1.5],
        "itl_s": [0.02, 0.03],
        "hit_rate": 0.4,
        "steps_s": 12.5,
        "requests": 2,
    }
    state = {"type": "state", "model": "m", "shards": [shard], "figures": figures}
    messages: list[dict[str, Any]] = [
        {"type": "hello", "version": 1, "at": 100.0, "unix": 0.0, "frame_s": 0.25, "state_s": 1.0}
    ]
    messages.append({**state, "at": 100.0, "queue": [], "queued": 0})
    messages.append({"type": "dropped", "count": 36})
    for number in range(12):
        at = 100.25 + number / 4
        block = {
            "shard": "a",
            "kind": "decode",
            "command": number,
            "start": at - 0.24,
            "end": at,
            "steps": 5,
            "tokens": 10,
        }
        block |= {"riders": [1, 2], "chunks": [[4, 0, 64, True]] if number == 11 else [], "drafted": 4, "accepted": 3}
        messages.append({"type": "frame", "model": "m", "at": at, "blocks": [block], "marks": []})
        if number == 5:
            messages.append({**state, "at": 101.5, "queue": [waiting], "queued": 1})
    return messages
