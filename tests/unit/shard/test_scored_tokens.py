"""Log probabilities of tokens that a sequence names, beside each token that it gets."""

import numpy as np
import pytest

from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.backends.toy.model import ToyVocabulary
from caravan_shard.checks.sampling import check_sampling
from caravan_testing.shard_builders import EngineDriver, first_chunk, toy_prompt
from caravan_testing.toy_oracle import expected_logprobs

PROMPT = toy_prompt("is it so?")
SCORED = (9, 70, 9, 3)


def test_scored_tokens_come_in_their_order_beside_rows_with_other_wishes() -> None:
    driver = EngineDriver()
    rows = driver.prefill(
        first_chunk(0, PROMPT, logprobs=True, top_n_tokens=2),
        first_chunk(1, PROMPT, logprobs=True, score_token_ids=SCORED),
        first_chunk(2, PROMPT),
        first_chunk(3, PROMPT, logprobs=True),
    ).rows
    expected = np.array(expected_logprobs([*PROMPT, 0])[-1])
    assert rows.top_counts == [2, len(SCORED), 0, 0]
    assert tuple(rows.top_token_ids[2:]) == SCORED
    assert rows.top_logprobs[2:] == pytest.approx(expected[list(SCORED)], abs=1e-4)
    assert rows.top_pieces == [ToyVocabulary().piece(token).data for token in rows.top_token_ids]
    assert rows.logprobs[0] == rows.logprobs[1] == rows.logprobs[3]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"logprobs": False, "score_token_ids": (1,)}, "needs logprobs"),
        ({"top_n_tokens": 1, "score_token_ids": (1,)}, "top_n_tokens must be 0"),
        ({"score_token_ids": (1,) * 257}, "<= 256"),
        ({"score_token_ids": (1, 260)}, "< 260. Given: 260"),
    ],
)
def test_what_cannot_be_scored_is_refused(fields: dict[str, object], problem: str) -> None:
    refusal = check_sampling(SamplingParams(**({"logprobs": True} | fields)), 260)  # type: ignore[arg-type]
    assert refusal is not None
    assert problem in refusal.sentence


def test_most_ids_that_are_allowed_are_scored() -> None:
    assert check_sampling(SamplingParams(logprobs=True, score_token_ids=(1,) * 256), 260) is None
