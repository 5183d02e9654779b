"""The models of the comparison, which are fetched or made once."""

import subprocess
import sys
from pathlib import Path

from bench.paths import DEMO_MODEL, ROOT, BenchError
from bench.tiny_models import TINY, write_tiny
from caravan_serve.bench.workloads import ALL_WORDS
from caravan_testing import shard_tiny_bert as bert
from caravan_testing.requantised import TYPES, requantise
from caravan_testing.shard_tiny_llama import Shape, write_tiny_llama

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
