"""A share of the stops of `PYTHONPATH=tests python -m stops.stops --stops 200`."""

import asyncio

import pytest
from stops.stops import stop_many
from stops.tally import summary

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(1200)]

STOPS = 12
KINDS = {
    *("Tokenize", "TokenizeTexts", "TokenizeTexts of pairs", "TokenizeParts", "Detokenize", "Embed", "EncodeMedia"),
    *("CompileConstraint", "Prefill", "Decode", "Save", "Load"),
}


def test_shards_that_are_stopped_answer_or_refuse_every_call_and_end_with_status_0() -> None:
    stops = asyncio.run(stop_many(STOPS, seed=1))
    problems = [f"{stop}: {problem}" for stop in stops for problem in stop.problems]
    assert not problems, "\n".join(problems)
    assert len(stops) == STOPS, summary(stops)
    ends = [end for stop in stops for end in stop.ends]
    assert {kind for kind, end in ends if end == "answered"} >= KINDS
