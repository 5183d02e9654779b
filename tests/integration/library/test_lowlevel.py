"""`caravan.lowlevel` over the toy model: a loop over its backend and its sampler writes what an `Executor` writes."""

import numpy as np
import pytest

from caravan import Executor, ModelError, lowlevel
from caravan import SamplingParams as OfAnExecutor


def test_a_loop_of_ones_own_draws_the_tokens_of_an_executor() -> None:
    backend = lowlevel.open_backend("toy.gguf", backend="fake", ctx_size=64, parallel=2)
    sampler = lowlevel.make_sampler(backend)
    params = lowlevel.SamplingParams(temperature=1.0, top_k=40, seed=5)
    tokens = backend.vocabulary.tokenize("a prompt", add_special=True, parse_special=True)
    new, drawn = tokens, list[int]()
    for _ in range(8):
        positions = np.arange(len(tokens) - len(new), len(tokens), dtype=np.int32)
        outputs = (positions == len(tokens) - 1).astype(np.int8)
        batch = lowlevel.TokenBatch(np.array(new, np.int32), positions, np.zeros_like(positions), outputs)
        assert backend.decode(batch) is lowlevel.DecodeOutcome.OK
        drawn += sampler.choose(backend.logits(1), [lowlevel.Choice(params, len(tokens))])
        new = drawn[-1:]
        tokens += new
    sampler.close()
    backend.close()
    with Executor("toy.gguf", backend="fake", ctx_size=64) as executor:
        conversation = executor.create()
        conversation.prompt("a prompt")
        expected = conversation.generate(8, OfAnExecutor(top_k=40, seed=5, ignore_eos=True))
        assert drawn == [token.id for token in expected]


def test_what_cannot_be_opened_is_named() -> None:
    with pytest.raises(ModelError):
        lowlevel.open_backend("nowhere.gguf")
    with pytest.raises(TypeError, match="parallels"):
        lowlevel.open_backend("toy.gguf", parallels=2)  # type: ignore[call-arg]
