"""The toy model: 256 byte tokens and four control tokens. Its logits are a fixed function of all tokens before."""

import numpy as np
from numpy.typing import NDArray

from caravan_proto.messages.model import FillTokens, ModelFile
from caravan_shard.arrays import Floats
from caravan_shard.backends.base import Piece
from caravan_shard.backends.model_users import ModelUsers

BOS = 256
EOS = 257
TURN_START = 258
TURN_END = 259
SPECIAL_TEXTS = {BOS: "<s>", EOS: "</s>", TURN_START: "<|im_start|>", TURN_END: "<|im_end|>"}
VOCABULARY_SIZE = 260

# Rows of logits that there are.
_ROWS = 4096

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TOY_FACTS = ModelFile(
    name="toy",
    fingerprint="toy-1",
    vocabulary_size=VOCABULARY_SIZE,
    vocabulary_fingerprint="toy-vocabulary",
    trained_context=1 << 20,
    chat_template=CHAT_TEMPLATE,
    bos_text="<s>",
    eos_text="</s>",
    eos_token_ids=frozenset({EOS, TURN_END}),
    architecture="toy",
    parameter_count=_ROWS * VOCABULARY_SIZE,
    weight_bytes=_ROWS * VOCABULARY_SIZE * 4,
    quantization="F32",
    device_bytes=0,
    metadata=(
        ("general.architecture", "toy"),
        ("general.file_type", 0),
        ("tokenizer.ggml.add_bos_token", True),
        ("toy.context_length", 1 << 20),
        ("toy.vocab_size", VOCABULARY_SIZE),
    ),
    # ASCII's separators of groups, records and units.
    fill=FillTokens(prefix=0x1D, suffix=0x1E, middle=0x1F, begin=BOS),
)


def _logit_table() -> Floats:
    """Return [rows, vocabulary]. Likely tokens are printable ASCII; one in 130 greedy tokens is an end token."""
    table = np.random.Generator(np.random.Philox(key=2)).standard_normal((_ROWS, VOCABULARY_SIZE), np.float32) * 2
    table[:, :32] -= 12
    table[:, 127:256] -= 12
    table[:, [BOS, TURN_START, TURN_END]] -= 12
    table[:, EOS] -= 0.4
    return table


_TABLE = _logit_table()


def toy_logits(states: NDArray[np.uint64]) -> Floats:
    """Return the logits [rows, vocabulary] after ``states`` [rows]."""
    logits: Floats = _TABLE[states % np.uint64(_ROWS)]
    return logits


class ToyVocabulary:
    """A Vocabulary: a token per UTF-8 byte, and the control tokens."""

    def __init__(self) -> None:
        self.users = ModelUsers()
        self._pieces = [Piece(bytes([byte]), special=False) for byte in range(256)]
        self._pieces += [Piece(SPECIAL_TEXTS[token].encode(), special=True) for token in sorted(SPECIAL_TEXTS)]

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Return BOS if ``add_special``, then a token per byte."""
        tokens = [BOS] if add_special else []
        start = 0
        while start < len(text):
            found = [(text.find(name, start), token) for token, name in SPECIAL_TEXTS.items()] if parse_special else []
            at, token = min((pair for pair in found if pair[0] >= 0), default=(len(text), -1))
            tokens.extend(text[start:at].encode())
            if token < 0:
                break
            tokens.append(token)
            start = at + len(SPECIAL_TEXTS[token])
        return tokens

    def pair(self, query: str, document: str) -> list[int]:
        """Return BOS, the query, EOS and the document."""
        return [BOS, *query.encode(), EOS, *document.encode()]

    def piece(self, token: int) -> Piece:
        """Return the byte, or the text of the control token."""
        return self._pieces[token]

    def pieces(self) -> list[Piece]:
        """Return all pieces."""
        return list(self._pieces)
