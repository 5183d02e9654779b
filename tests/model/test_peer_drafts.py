"""Heads draft the tokens that llama-server drafts with them, one by one, on the same files and prompts.

Needs the llama-server that `make bench` builds.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from bench.paths import BenchError, peer
from bench.peer_drafts import PeerAnswer, peer_answers

from caravan_testing.seen_drafts import watch_drafts
from caravan_testing.shard_builders import first_chunk, with_parameters
from caravan_testing.shard_models import (
    CHAIN_HEAD_MODEL,
    EAGLE3_MODEL,
    SMALL_EAGLE3_HEAD,
    TOKENIZER,
    ModelDriver,
    fetched,
)
from caravan_testing.shard_tiny_delta_net import write_tiny_qwen35
from caravan_testing.shard_tiny_glm import write_tiny_glm
from caravan_testing.shard_tiny_llama import Shape, write_tiny_llama
from caravan_testing.tiny_dflash import Dflash, write_cyclic
from caravan_testing.tiny_eagle3 import Eagle3
from caravan_testing.tiny_heads import Heads

pytestmark = [pytest.mark.model, pytest.mark.slow]

# So few steps that none goes without drafts to see what that costs.
NEW, MOST = 28, 3
# Tokens of the prompts: none or several chunks.
LENGTHS = (1, 20, 61, 300)
# Both round otherwise. Of two tokens whose probabilities are as close as this, either may be the draft.
TIE, TIE_LOGITS = 0.004, 0.05


class Files(NamedTuple):
    """A model, and the file of its head if that is another one."""

    model: Path
    head: Path | None = None


# Their heads are often wrong, and read hidden states that matter as much as the token.
_OFTEN_WRONG = Heads(trunk=0.02, state=0.5)


def _eagle3(folder: Path) -> Files:
    model = write_tiny_llama(folder / "model.gguf", Shape(layers=4, context=4096, trunk=0.1), fetched(TOKENIZER))
    return Files(model, Eagle3(state=1.0, layers=(3, 0, 2)).write(folder / "head.gguf", fetched(TOKENIZER)))


def _blocks(folder: Path, head: Dflash) -> Files:
    """Return a head whose blocks are as long as llama-server makes them for ``MOST`` tokens."""
    written = write_tiny_llama(folder / "written.gguf", Shape(layers=4, context=4096, trunk=0.1), fetched(TOKENIZER))
    return Files(write_cyclic(folder / "model.gguf", written), head.write(folder / "head.gguf", fetched(TOKENIZER)))


KINDS: dict[str, Callable[[Path], Files]] = {
    "glm4moe": lambda folder: Files(write_tiny_glm(folder / "model.gguf", fetched(TOKENIZER), _OFTEN_WRONG)),
    "glm4moe-chain": lambda folder: Files(fetched(CHAIN_HEAD_MODEL)),
    "qwen35": lambda folder: Files(write_tiny_qwen35(folder / "model.gguf", fetched(TOKENIZER), _OFTEN_WRONG)),
    "eagle3": _eagle3,
    "eagle3-small": lambda folder: Files(fetched(EAGLE3_MODEL), fetched(SMALL_EAGLE3_HEAD)),
    "dflash": lambda folder: _blocks(folder, Dflash(block=MOST + 1, state=1.0)),
    "dspark": lambda folder: _blocks(folder, Dflash(block=MOST, state=1.0, markov=1.0, from_last=True)),
}


@pytest.fixture(autouse=True)
def peer_is_built() -> None:
    """Skip only where there is no llama-server."""
    try:
        peer("llama-server")
    except BenchError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_llama_server(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours are of all sequences at once, llama-server's of one after another."""
    model, head = KINDS[kind](tmp_path)
    # Of these prompts, no text has a token that ends it: llama-server passes over these with ignore_eos.
    chance = random.Random(f"prompts of {kind}")
    # No other prompt begins with the same token.
    prompts = [[300 + length, *(chance.randrange(700, 1200) for _ in range(length - 1))] for length in LENGTHS]
    spec_type = f"draft-{kind.split('-')[0]}" if head else "draft-mtp"
    flags = ["--spec-type", spec_type, "--spec-draft-n-max", str(MOST), *(["-md", str(head)] if head else [])]
    answers = peer_answers(f"drafts-{kind}", model, prompts, NEW, *flags)
    options: dict[str, Any] = {"model_draft": str(head)} if head else {}
    options |= {"ctx_size": 2048, "rollback_tokens": MOST, "kv_layout": "unified"}
    driver = ModelDriver(model, spec_type=spec_type, **options)
    driver.tie_logits = TIE_LOGITS
    seen = watch_drafts(monkeypatch)
    for number, prompt in enumerate(prompts):
        chunk = first_chunk(number, prompt, max_new=NEW, ignore_eos=True)
        driver.prefill(with_parameters(chunk, max_draft_tokens=MOST))
    driver.decode(list(range(len(prompts))), max_draft_tokens=len(prompts) * MOST)
    outputs = dict(driver.output)
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        text = [*prompt, *answer.tokens]
        check_drafts(answer, {len(tokens): draft for tokens, draft in seen if tokens == text[: len(tokens)]})
        driver.check_same(prompt, answer.tokens, outputs[number])
    driver.engine.close()


def check_drafts(answer: PeerAnswer, ours: dict[int, list[int]]) -> None:
    """Check that drafts after the same tokens are equal, or first differ at a tie."""
    # Where one differs, the next ones may begin elsewhere.
    assert len(ours.keys() & answer.drafts.keys()) >= 0.8 * len(ours) > 5
    for before in ours.keys() & answer.drafts.keys():
        assert len(ours[before]) == len(answer.drafts[before])
        for token, candidates in zip(ours[before], answer.drafts[before], strict=True):
            best = next(iter(candidates))
            if token != best:
                gap = candidates[best] - candidates.get(token, 0.0)
                assert gap <= TIE, f"the draft after {before} tokens has {token} for {candidates}"
                break
