"""A generation goes on with the tokens that another router got, as if nothing had been between."""

from dataclasses import replace

import pytest

from caravan_proto.messages.sampling import SamplingParams
from caravan_scheduler.core.generation import Continued, GenerationSpec
from caravan_testing.cluster import cluster
from caravan_testing.specs import read, spec, undisturbed, with_feedback

PROMPT = list(range(60, 100))
PENALIZED = SamplingParams(temperature=1.0, seed=7, repetition_penalty=1.3, presence_penalty=0.5)
SPECS = {
    "greedy": spec(PROMPT, 60),
    "sampled": spec(PROMPT, 60, seed=5),
    "penalized": replace(spec(PROMPT, 60), sampling=PENALIZED),
    "adaptive": with_feedback(spec(PROMPT, 60, seed=1), 0),
    "mirostat": with_feedback(spec(PROMPT, 60, seed=2), 1),
    "mirostat 2": with_feedback(spec(PROMPT, 60, seed=3), 2),
}


@pytest.mark.parametrize("wanted", SPECS.values(), ids=SPECS)
async def test_the_rest_is_the_same_as_without_interruption(wanted: GenerationSpec) -> None:
    async with cluster() as first:
        stream = first.engine.submit(wanted)
        tokens: list[int] = []
        async for ready in stream:
            tokens += [token.token_id for token in ready]
            if len(tokens) >= 20:
                break
        continued = Continued(token_ids=tuple(tokens), feedback=stream.feedback)
        stream.close()
        await first.wait_until_at_rest()
    whole = undisturbed(wanted)
    assert tokens == whole[: len(tokens)]
    async with cluster() as second:
        rest = second.engine.submit(replace(wanted, continued=continued))
        assert await read(rest) == whole[len(tokens) :]
        await second.wait_until_at_rest()
        # A second time, the cache has tokens of the output, which are none of the prompt.
        again = second.engine.submit(replace(wanted, continued=continued))
        assert await read(again) == whole[len(tokens) :]
        assert again.cached_tokens <= len(PROMPT)
        await second.wait_until_at_rest()
