"""The models of the comparison, which are fetched or made once."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from numpy.typing import NDArray

from bench.paths import DEMO_MODEL, ROOT, BenchError
from caravan_serve.bench.workloads import ALL_WORDS
from caravan_testing import shard_tiny_bert as bert
from caravan_testing.gguf_file import fields_of
from caravan_testing.shard_models import TYPES, requantise
from caravan_testing.shard_tiny_llama import Shape, write_tiny_llama

_NORMAL = 1


def add_tokenizer(writer: GGUFWriter, source: Path, tokens: int | None = None) -> None:
    """Add the tokenizer of the GGUF file ``source``, filled up to ``tokens`` with tokens that no text has."""
    for key, (value, kind, of_items) in fields_of(source).items():
        if key.startswith("tokenizer."):
            filled = value if of_items is None or tokens is None else _filled(key, value, tokens)
            writer.add_key_value(key, filled, kind, of_items)


def _filled(key: str, values: list[Any], tokens: int) -> list[Any]:
    """Return ``values`` with an entry for each token, if the list has entries for tokens."""
    missing = range(len(values), tokens)
    match key.removeprefix("tokenizer.ggml."):
        case "tokens":
            return [*values, *(f"unused{token}" for token in missing)]
        case "scores":
            return [*values, *(-1e6 for _ in missing)]
        case "token_type":
            return [*values, *(_NORMAL for _ in missing)]
        case _:
            return values


_EMBEDDING, _HEADS, _INNER, _CONTEXT = 64, 4, 128, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiny:
    """``tokenizer_of``: the model whose tokenizer it gets, filled up to ``tokens`` with tokens that no text has.

    ``spread``: the standard deviation of a step's logits. At 2 they are flat: hundreds of tokens are likely. At 8 they
    are peaked, as those of most steps of a real model are.
    """

    tokenizer_of: str
    tokens: int
    spread: float = 2.0


TINY = {
    "tiny-49k": Tiny(tokenizer_of="smollm2-q4_1", tokens=49_152),
    "tiny-49k-peaked": Tiny(tokenizer_of="smollm2-q4_1", tokens=49_152, spread=8.0),
    "tiny-152k": Tiny(tokenizer_of="smollm2-q4_1", tokens=151_936),
    "tiny-262k": Tiny(tokenizer_of="gemma-3-270m", tokens=262_144),
    "tiny-262k-peaked": Tiny(tokenizer_of="gemma-3-270m", tokens=262_144, spread=8.0),
}


def write_tiny(path: Path, tiny: Tiny, source: Path) -> Path:
    """Write the model with the tokenizer of the GGUF file ``source``, the same one every time; return ``path``."""
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(_EMBEDDING)
    writer.add_feed_forward_length(_INNER)
    writer.add_head_count(_HEADS)
    writer.add_block_count(1)
    writer.add_rope_dimension_count(_EMBEDDING // _HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    add_tokenizer(writer, source, tiny.tokens)
    for name, tensor in _tensors(tiny).items():
        if name == "token_embd.weight":
            writer.add_tensor(name, quantize(tensor, GGMLQuantizationType.Q8_0), raw_dtype=GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(tiny: Tiny) -> dict[str, NDArray[np.float32]]:
    random = np.random.default_rng(7)

    def weights(rows: int, columns: int) -> NDArray[np.float32]:
        drawn: NDArray[np.float64] = random.standard_normal((rows, columns)) / np.sqrt(columns)
        return drawn.astype(np.float32)

    # The same matrix makes the logits; what it is multiplied with has a length of sqrt(_EMBEDDING).
    return {
        "token_embd.weight": weights(tiny.tokens, _EMBEDDING) * np.float32(tiny.spread),
        "output_norm.weight": np.ones(_EMBEDDING, np.float32),
        "blk.0.attn_norm.weight": np.ones(_EMBEDDING, np.float32),
        "blk.0.attn_q.weight": weights(_EMBEDDING, _EMBEDDING),
        "blk.0.attn_k.weight": weights(_EMBEDDING, _EMBEDDING),
        "blk.0.attn_v.weight": weights(_EMBEDDING, _EMBEDDING),
        "blk.0.attn_output.weight": weights(_EMBEDDING, _EMBEDDING),
        "blk.0.ffn_norm.weight": np.ones(_EMBEDDING, np.float32),
        "blk.0.ffn_gate.weight": weights(_INNER, _EMBEDDING),
        "blk.0.ffn_up.weight": weights(_INNER, _EMBEDDING),
        "blk.0.ffn_down.weight": weights(_EMBEDDING, _INNER),
    }


_FETCHED = {
    "smollm2-q4_1": DEMO_MODEL,
    "gemma-3-270m": DEMO_MODEL.with_name("gemma-3-270m-q4_k_m.gguf"),
}
# Q4_0 is twice as fast as its source, so that what a server adds to each step shows more.
_REQUANTISED = {"smollm2-q4_0": "Q4_0", "smollm2-q8_0": "Q8_0"}
# Random weights in whole blocks of K-quants, which the dimensions of the fetched models are no multiple of.
_RANDOM = {f"random-{weights.lower()}": weights for weights in TYPES}
_RANDOM_SHAPE = Shape(embedding=512, layers=4, heads=8, inner=1536)
# An encoder of the shape of MiniLM, whose vocabulary has the words of the load generator.
_BERT = "bert-q8_0"
_BERT_SHAPE = bert.Shape(embedding=384, layers=6, heads=12, inner=1536, context=512)
NAMES = (*_FETCHED, *_REQUANTISED, *_RANDOM, *TINY, _BERT)


def model(name: str) -> Path:
    """Return the GGUF file of a model in `NAMES`, or the file ``name``. Raises BenchError if there is none."""
    if name in _REQUANTISED:
        return _requantised(model("smollm2-q4_1"), _REQUANTISED[name])
    if name in _RANDOM:
        return _requantised(_random(), _RANDOM[name])
    if name in TINY:
        return _tiny(name)
    if name == _BERT:
        return _requantised(_bert(), "Q8_0")
    if name not in _FETCHED:
        if not Path(name).is_file():
            message = f"no model {name!r}: give a GGUF file or one of {', '.join(NAMES)}"
            raise BenchError(message)
        return Path(name).resolve()
    path = _FETCHED[name]
    if not path.is_file():
        command = [sys.executable, str(ROOT / "deploy/setup/fetch_model.py"), str(path)]
        if subprocess.run(command, check=False).returncode != 0:
            message = f"cannot fetch {path.name}"
            raise BenchError(message)
    return path


def _random() -> Path:
    path = DEMO_MODEL.with_name("random.F32.gguf")
    if not path.is_file():
        write_tiny_llama(path.with_suffix(".unfinished"), _RANDOM_SHAPE).rename(path)
    return path


def _bert() -> Path:
    path = DEMO_MODEL.with_name("bert.F32.gguf")
    if not path.is_file():
        tokens = (*bert.TOKENS, *(f"▁{word}" for word in ALL_WORDS if f"▁{word}" not in bert.TOKENS))
        made = bert.TinyBert(shape=_BERT_SHAPE, tokens=tokens).write(path.with_suffix(".unfinished"))
        made.rename(path)
    return path


def _tiny(name: str) -> Path:
    target = DEMO_MODEL.with_name(f"{name}.gguf")
    if not target.is_file():
        write_tiny(target.with_suffix(".unfinished"), TINY[name], model(TINY[name].tokenizer_of)).rename(target)
    return target


def _requantised(source: Path, weights: str) -> Path:
    target = source.with_name(f"{source.name.split('.')[0]}.{weights}.gguf")
    if not target.is_file():
        unfinished = target.with_suffix(".unfinished")
        try:
            requantise(source, unfinished, weights)
        except OSError as error:
            raise BenchError(str(error)) from error
        unfinished.rename(target)
    return target
