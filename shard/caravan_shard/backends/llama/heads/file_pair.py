"""What must be true of a head's file and that of its model, whatever kind of head it is.

Where a file lacks something, or has it in another shape, llama.cpp would end the process at the first draft, if not
before.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from caravan_models.gguf_header import ARCHITECTURE, GgufHeader
from caravan_shard.backends.llama.heads.states import can_get_inputs
from caravan_shard.startup_error import StartupError

# Architectures of models whose graphs hand out what each layer reads: where one does not, llama.cpp ends the process.
ARCHITECTURES = frozenset({"gpt-oss", "llama", "qwen3", "qwen3moe", "qwen35", "qwen35moe"})
# enum ggml_type: whole numbers of 64 bits.
_I64 = 27
_EMBEDDINGS, _OUTPUT, _TOKENS_OF_HEAD = "token_embd.weight", "output.weight", "d2t"
_TOKENS = "tokenizer.ggml.tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePair:
    """A head in the file ``path``, and its model. Its functions return why the head cannot be used, None if it can."""

    path: Path
    head: GgufHeader
    model: GgufHeader

    def number(self, key: str) -> int | None:
        """Return a whole number of the head's architecture."""
        return self.head.number(self.key(key))

    def key(self, key: str) -> str:
        """Return the name that ``key`` has in the head's file."""
        return f"{self.head.text(ARCHITECTURE)}.{key}"

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers of the model that the head reads."""
        return self.head.lists.get(self.key("target_layers"), ())

    @property
    def tokens(self) -> int:
        """The size of the head's vocabulary."""
        return self.head.list_lengths.get(_TOKENS, 0)

    @property
    def model_size(self) -> int:
        """How many numbers a hidden state of the model has."""
        return self._of_model("embedding_length")

    def _of_model(self, key: str) -> int:
        return self.model.number(f"{self.model.text(ARCHITECTURE)}.{key}") or 0

    def lacking(self, needed: Iterable[str]) -> str | None:
        """Check that the model can be read, and that the head has the tensors ``needed``."""
        architecture = self.model.text(ARCHITECTURE)
        if architecture not in ARCHITECTURES:
            return f"no hidden states can be read from the architecture {architecture} yet"
        if not can_get_inputs():
            return "this build of llama.cpp does not hand out what layers read"
        missing = [name for name in needed if name not in self.head.tensors]
        return f"it lacks the tensor {missing[0]}" if missing else None

    def other_layers(self, count: int | None = None) -> str | None:
        """Check which layers of the model it reads: so many, or at least one."""
        read, most = self.layers, self._of_model("block_count") - self._of_model("nextn_predict_layers")
        if len(read) == (count or max(1, len(read))) and all(0 <= layer < most for layer in read):
            return None
        wanted = "some" if count is None else count
        return f"it must read {wanted} of the model's layers 0 to {most - 1}. Given: {', '.join(map(str, read))}"

    def other_keys(self, own: int) -> str | None:
        """Check that keys and values have one size. ``own``: numbers of a hidden state of the head."""
        heads = self.number("attention.head_count") or 1
        key, value = (self.number(f"attention.{name}_length") or own // heads for name in ("key", "value"))
        return None if key == value else f"its keys have {key} numbers, and its values {value}"

    def borrowed(self) -> Sequence[str]:
        """Return the names of the tensors that it takes from the model."""
        return [name for name in (_EMBEDDINGS, _OUTPUT) if name not in self.head.tensors]

    def other_tokens(self) -> str | None:
        """Check that it has the tokens of the model, or predicts some of these."""
        tokens, of_model = self.tokens, self.model.list_lengths.get(_TOKENS, 0)
        if tokens != of_model:
            return f"it has another vocabulary, of {tokens} tokens instead of {of_model}"
        embedded = self.head.tensors.get(_EMBEDDINGS)
        if embedded is not None and embedded.lengths[-1] != tokens:
            return f"it has embeddings of {embedded.lengths[-1]} of {tokens} tokens"
        chosen = self.head.tensors.get(_TOKENS_OF_HEAD)
        if chosen is None:
            return None
        if _OUTPUT not in self.head.tensors:
            return "it has its own tokens, and no output layer for them"
        if chosen.kind != _I64 or len(chosen.lengths) != 1:
            return f"its tokens ({_TOKENS_OF_HEAD}) are no list of 64-bit numbers"
        try:
            # No more than there may be: the file may claim anything.
            numbers = np.fromfile(self.path, "<i8", min(chosen.lengths[0], tokens + 1), offset=chosen.start)
        except (OSError, ValueError) as error:
            raise StartupError(f"cannot read {self.path}: {error}") from error
        is_whole = len(numbers) == chosen.lengths[0]
        if not is_whole or not all(0 <= number < tokens for number in (numbers.min(), numbers.max())):
            return f"its tokens ({_TOKENS_OF_HEAD}) are not all of the {tokens} ones of the model"
        return None
