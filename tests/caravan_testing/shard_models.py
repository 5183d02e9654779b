"""Real models for tests, and how two greedy outputs are compared."""

import ctypes
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import pytest

from caravan_shard.backends.base import Backend
from caravan_shard.backends.llama.backend import LlamaCppBackend
from caravan_shard.config import ShardConfig
from caravan_testing.shard_builders import EngineDriver, first_chunk, next_chunk
from caravan_testing.shard_tiny_delta_net import write_tiny_qwen3next, write_tiny_qwen35
from caravan_testing.shard_tiny_glm import GlmShape, write_chain_glm, write_tiny_glm
from caravan_testing.shard_tiny_hybrid import write_tiny_hybrid
from caravan_testing.shard_tiny_lfm2 import write_tiny_lfm2
from caravan_testing.shard_tiny_llama import Shape, write_tiny_llama
from caravan_testing.shard_tiny_mamba import write_tiny_mamba
from caravan_testing.shard_tiny_mrope import write_tiny_mrope
from caravan_testing.shard_tiny_window import write_tiny_window
from caravan_testing.tiny_dflash import Dflash, write_cyclic
from caravan_testing.tiny_eagle3 import Eagle3, write_tiny_eagle3_llama
from caravan_testing.tiny_heads import Heads
from caravan_testing.tiny_weights import write_first_tokens

ROOT = Path(__file__).parents[2]
DEMO_MODEL = Path(os.environ.get("CARAVAN_TEST_MODEL", ROOT / ".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf"))
# How many layers are on GPUs: 0 for the host's CPUs, -1 for all of them on GPUs.
GPU_LAYERS = int(os.environ.get("CARAVAN_TEST_GPU_LAYERS", "0"))
# Most of its layers attend to a window of 512 tokens.
WINDOW_MODEL = ROOT / ".cache/models/gemma-3-270m-q4_k_m.gguf"
_TINY = ROOT / ".cache/models/tiny"
# The first tokens of the demo model and its chat template, without weights. A model with a sixth of the tokens is
# opened in a sixth of the time. Written when a test needs it, as all those below are.
VOCABULARY_SIZE = 8192
TOKENIZER = _TINY / "tiny-tokenizer.gguf"
PLAIN_MODEL = _TINY / "tiny-llama.gguf"
# As the one above, with the tokenizer and the chat template of the demo model. A step takes less than a millisecond:
# for tests that compare texts with texts, or watch what a server does.
WORDS_MODEL = _TINY / "tiny-llama-words.gguf"
# Its positions have three dimensions.
POSITIONS_MODEL = _TINY / "tiny-qwen2vl.gguf"
# Half of the layers attend to a window of 64 tokens.
SMALL_WINDOW_MODEL = _TINY / "tiny-gemma3.gguf"
# Half of the layers of the first four are recurrent, and all of the last.
HYBRID_MODEL = _TINY / "tiny-granitehybrid.gguf"
DELTA_MODEL = _TINY / "tiny-qwen3next.gguf"
# Its positions have three dimensions, too, and the last tokens of this one and the next can be taken back.
DELTA_POSITIONS_MODEL = _TINY / "tiny-qwen35.gguf"
CONVOLUTION_MODEL = _TINY / "tiny-lfm2.gguf"
RECURRENT_MODEL = _TINY / "tiny-mamba.gguf"
# They have heads, which are right nearly always.
HEAD_MODEL = _TINY / "tiny-glm4moe.gguf"
HYBRID_HEAD_MODEL = _TINY / "tiny-qwen35-mtp.gguf"
HYBRID_MOE_HEAD_MODEL = _TINY / "tiny-qwen35moe-mtp.gguf"
# Heads of the first one, of which the second lacks one token in 20. The first may draft for the models with heads, too.
EAGLE3_MODEL = _TINY / "tiny-eagle3-llama.gguf"
EAGLE3_HEAD = _TINY / "tiny-eagle3.gguf"
SMALL_EAGLE3_HEAD = _TINY / "tiny-eagle3-small.gguf"
# In the first two, the next token is the next one of a cycle, as in the heads behind them. The recurrent layers of the
# second have positions of three dimensions.
DFLASH_MODEL = _TINY / "tiny-dflash-llama.gguf"
DFLASH_HYBRID_MODEL = _TINY / "tiny-dflash-qwen35.gguf"
DFLASH_HEAD = _TINY / "tiny-dflash.gguf"
DFLASH_GRIDS_HEAD = _TINY / "tiny-dflash-grids.gguf"
DSPARK_HEAD = _TINY / "tiny-dspark.gguf"
# Its head takes a small part of the time of a step and is right nine times in ten; rounding changes no greedy text.
CHAIN_HEAD_MODEL = _TINY / "tiny-glm4moe-chain.gguf"
# Batch shapes and places in the cache change the rounding. Logits of two tokens that are closer than this count as
# equal. Seen: below 0.1 on the demo model; 1.9 on the other, where a prompt's last token was computed alone instead of
# with the rest.
TIE_LOGITS = {
    DEMO_MODEL: float(os.environ.get("CARAVAN_TEST_TIE_LOGITS", "0.25")),
    WINDOW_MODEL: 2.0,
    PLAIN_MODEL: 0.01,
    WORDS_MODEL: 0.01,
    SMALL_WINDOW_MODEL: 0.01,
    POSITIONS_MODEL: 0.01,
    CONVOLUTION_MODEL: 0.01,
    HEAD_MODEL: 0.01,
    EAGLE3_MODEL: 0.01,
    DFLASH_MODEL: 0.01,
}
_HEADS = Heads(trunk=0.0003, state=0.001)
_CHAIN = GlmShape(embedding=256, layers=12, dense=12, feed_forward=512, expert=128)
_WRITERS: dict[Path, Callable[[Path], Path]] = {
    TOKENIZER: lambda path: write_first_tokens(path, DEMO_MODEL, VOCABULARY_SIZE),
    POSITIONS_MODEL: write_tiny_mrope,
    PLAIN_MODEL: lambda path: write_tiny_llama(path, Shape(context=4096)),
    WORDS_MODEL: lambda path: write_tiny_llama(path, Shape(context=4096), fetched(TOKENIZER)),
    SMALL_WINDOW_MODEL: lambda path: write_tiny_window(path, fetched(TOKENIZER)),
    HYBRID_MODEL: lambda path: write_tiny_hybrid(path, fetched(TOKENIZER)),
    DELTA_MODEL: lambda path: write_tiny_qwen3next(path, fetched(TOKENIZER)),
    DELTA_POSITIONS_MODEL: lambda path: write_tiny_qwen35(path, fetched(TOKENIZER)),
    CONVOLUTION_MODEL: lambda path: write_tiny_lfm2(path, fetched(TOKENIZER)),
    RECURRENT_MODEL: lambda path: write_tiny_mamba(path, fetched(TOKENIZER)),
    HEAD_MODEL: lambda path: write_tiny_glm(path, fetched(TOKENIZER), _HEADS),
    CHAIN_HEAD_MODEL: lambda path: write_chain_glm(path, 1000, Heads(trunk=0.0002, right=0.9), _CHAIN, peak=8.0),
    HYBRID_HEAD_MODEL: lambda path: write_tiny_qwen35(path, fetched(TOKENIZER), _HEADS),
    HYBRID_MOE_HEAD_MODEL: lambda path: write_tiny_qwen35(path, fetched(TOKENIZER), _HEADS, has_experts=True),
    EAGLE3_MODEL: lambda path: write_tiny_eagle3_llama(path, fetched(TOKENIZER)),
    EAGLE3_HEAD: lambda path: Eagle3().write(path, fetched(TOKENIZER)),
    SMALL_EAGLE3_HEAD: lambda path: Eagle3(
        vocabulary=[token for token in range(VOCABULARY_SIZE) if token % 20], norms_input=True
    ).write(path, fetched(TOKENIZER)),
    DFLASH_MODEL: lambda path: write_cyclic(path, fetched(EAGLE3_MODEL)),
    DFLASH_HYBRID_MODEL: lambda path: write_cyclic(path, fetched(HYBRID_HEAD_MODEL)),
    DFLASH_HEAD: lambda path: Dflash().write(path, fetched(TOKENIZER)),
    DFLASH_GRIDS_HEAD: lambda path: Dflash(has_grids=True, window=64).write(path, fetched(TOKENIZER)),
    DSPARK_HEAD: lambda path: Dflash(
        markov=0.01, from_last=True, vocabulary=[token for token in range(VOCABULARY_SIZE) if token % 20]
    ).write(path, fetched(TOKENIZER)),
}


def fetched(model: Path) -> Path:
    """Return the file, after writing or downloading it if it is missing; the test fails if that fails."""
    write = _WRITERS.get(model)
    if write is not None and not model.exists():
        model.parent.mkdir(parents=True, exist_ok=True)
        with model.with_suffix(".lock").open("wb") as lock:
            # Another process may write it meanwhile, and load it: a file put in its place would be a changed model.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not model.exists():
                write(model.with_suffix(".unfinished")).replace(model)
    if not model.exists():
        command = [sys.executable, str(ROOT / "deploy/setup/fetch_model.py"), str(model)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.fail(f"cannot fetch {model.name}: {done.stderr.strip()}")
    return model


def know_contents(backend: Backend) -> None:
    """Let a backend know what is in its files, as its shard does."""
    files = backend.contents.files
    contents = None if files is None else files.read()
    assert contents is not None
    backend.contents.know(contents)


class ModelDriver(EngineDriver):
    """An EngineDriver with llama.cpp."""

    def __init__(self, model: Path, **flags: Any) -> None:
        # One thread: two that spin at barriers stand still when other processes want their cores.
        usual = {"parallel": 4, "threads": 1, "flash_attn": "on", "gpu_layers": GPU_LAYERS}
        config = ShardConfig(**{"model": str(model), **usual, **flags})
        self.backend: Any
        super().__init__(LlamaCppBackend(config))
        know_contents(self.backend)
        self.model = model
        self.tie_logits = TIE_LOGITS.get(model, 0.0)

    def tokens(self, text: str) -> list[int]:
        """Tokenize ``text``, with what the model puts before a text."""
        tokens: list[int] = self.backend.vocabulary.tokenize(text, add_special=True, parse_special=True)
        return tokens

    def first_position(self, sequence_id: int) -> int:
        """Return the first position that every layer holds; -1 if the sequence holds nothing."""
        memory = llama_cpp.llama_get_memory(self.backend._context)
        return int(llama_cpp.llama_memory_seq_pos_min(memory, sequence_id))

    def prefill_long(self, sequence_id: int, tokens: Sequence[int], *, max_new: int) -> None:
        """Prefill a prompt in as many steps as it takes."""
        most = self.backend.capacity.max_batch_tokens
        for start in range(0, len(tokens), most):
            part = tokens[start : start + most]
            last = start + most >= len(tokens)
            if start == 0:
                chunk = first_chunk(sequence_id, part, total=len(tokens), last=last, max_new=max_new, ignore_eos=True)
            else:
                chunk = next_chunk(sequence_id, start, part, last=last)
            self.prefill(chunk)

    def alone(self, tokens: Sequence[int], new_tokens: int) -> list[int]:
        """Return the greedy output of a sequence that runs alone; the shard is empty afterwards."""
        self.engine.release_all()
        self.prefill_long(0, tokens, max_new=new_tokens)
        self.decode([0])
        self.engine.release_all()
        return self.output.pop(0)

    def check_same(self, tokens: Sequence[int], expected: Sequence[int], got: Sequence[int]) -> None:
        """Check that the outputs are equal, or first differ at a tie; the shard is empty afterwards."""
        assert len(expected) == len(got)
        for place, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
            if ours != theirs:
                self.engine.release_all()
                self.prefill_long(0, [*tokens, *expected[:place]], max_new=1)
                logits = self.backend.logits(1)[0]
                gap = abs(float(logits[ours] - logits[theirs]))
                assert gap < self.tie_logits, f"token {place} is {ours} for {theirs}, {gap:.4f} logits apart"
                return


TYPES = {
    "Q4_1": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_1,
    "Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "Q4_K_M": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
}


def requantise(source: Path, target: Path, weights: str = "Q4_0") -> Path:
    """Write the model of ``source`` with weights of a type in `TYPES`; return ``target``. Raises OSError."""
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = TYPES[weights]
    parameters.allow_requantize = True
    status = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(parameters))
    if status != 0:
        message = f"llama.cpp cannot requantise {source.name}: status {status}"
        raise OSError(message)
    return target


# One for each family of memory that llama.cpp has.
FAMILIES = {
    "plain": PLAIN_MODEL,
    "sliding window": SMALL_WINDOW_MODEL,
    "M-RoPE": POSITIONS_MODEL,
    "recurrent": RECURRENT_MODEL,
    "granitehybrid": HYBRID_MODEL,
    "qwen3next": DELTA_MODEL,
    "qwen35": DELTA_POSITIONS_MODEL,
    "lfm2": CONVOLUTION_MODEL,
}
