"""A scripted engine whose outputs have tokens that its tokenizer would not choose for their text."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from caravan_proto.messages.model import TokenizedText
from caravan_scheduler.core.engine import ModelFacts
from caravan_testing.scripted_engine import BOS, CHAT_MODEL, EOS, EOS_TOKEN, ScriptedEngine, word

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}</tool_call>{% endfor %}</s>{% endfor %}"
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}[assistant]"
)
WORD_MODEL = replace(CHAT_MODEL, chat_template=TEMPLATE, max_sequence_tokens=512)
FIRST_WORD = 900


@dataclass
class WordEngine(ScriptedEngine):
    """An engine that generates ``words``, one token each, and the end token. The tokenizer splits text by character."""

    model: ModelFacts = WORD_MODEL
    words: Sequence[str] = ("Hello", " you")

    def __post_init__(self) -> None:
        self.controls = {"</s>": EOS}
        tokens = [word(piece, FIRST_WORD + at) for at, piece in enumerate(self.words)]
        self.script = lambda _: [*tokens, EOS_TOKEN]

    async def detokenize(self, token_ids: Sequence[int]) -> TokenizedText:
        known = {FIRST_WORD + at: piece.encode() for at, piece in enumerate(self.words)} | {BOS: b"<s>", EOS: b"</s>"}
        pieces = [known.get(token_id) or chr(max(0, token_id - 100)).encode() for token_id in token_ids]
        return TokenizedText(tuple(token_ids), tuple(pieces), tuple(token_id in (BOS, EOS) for token_id in token_ids))


def prompt_text(engine: ScriptedEngine) -> str:
    """Return the last prompt; words that were generated as their ids in angle brackets."""
    return "".join(map(_shown, engine.spec.prompt[1:]))


def _shown(token_id: int) -> str:
    if token_id == EOS:
        return "</s>"
    return f"<{token_id}>" if token_id >= FIRST_WORD else chr(token_id - 100)
