"""Stop tokens and ``min_tokens`` on the toy model, with and without a grammar."""

from typing import Any

import pytest

from caravan_proto.messages.results import FinishReason
from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.backends.toy.model import EOS, TOY_FACTS
from caravan_testing.shard_builders import EngineDriver, first_chunk, toy_grammar, toy_prompt
from caravan_testing.toy_oracle import expected_output

PROMPT = toy_prompt("a prompt")
DRAWN = SamplingParams(temperature=0.9, top_k=60, seed=4)


def run(prompt: list[int] = PROMPT, **fields: Any) -> tuple[list[int], FinishReason | None]:
    """Run one sequence to its end; return its output and finish reason."""
    driver = EngineDriver()
    result = driver.prefill(first_chunk(2, prompt, **fields))
    results = [result, *driver.decode([2])]
    return driver.output[2], results[-1].rows.finish_reasons[0]


def test_a_stop_token_ends_a_sequence_and_stays_in_its_output() -> None:
    free, _ = run(ignore_eos=True)
    stop = free[20]
    output, reason = run(ignore_eos=True, stop_token_ids=frozenset({stop, 250}))
    assert output == free[: free.index(stop) + 1]
    assert reason is FinishReason.STOP_TOKEN


def test_an_end_token_that_is_ignored_may_be_a_stop_token() -> None:
    for seed in range(20):
        sampling = SamplingParams(temperature=1.0, seed=seed)
        free, _ = run(sampling=sampling, ignore_eos=True, max_new=300)
        if EOS not in free[:-1]:
            continue
        output, reason = run(sampling=sampling, ignore_eos=True, max_new=300, stop_token_ids=frozenset({EOS}))
        assert output == free[: free.index(EOS) + 1]
        assert reason is FinishReason.STOP_TOKEN
        # Without ignore_eos it is an end token first.
        output, reason = run(sampling=sampling, max_new=300, stop_token_ids=frozenset({EOS}))
        assert reason is FinishReason.EOS_TOKEN
        return
    pytest.fail("no sequence had an end token")


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0), DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("least", [1, 7, 50])
def test_nothing_ends_a_sequence_before_min_tokens(sampling: SamplingParams, least: int) -> None:
    stops = frozenset(range(97, 123))
    output, reason = run(sampling=sampling, stop_token_ids=stops, min_tokens=least)
    assert len(output) > least or (reason is FinishReason.LENGTH and len(output) == 50)
    assert not (stops | TOY_FACTS.eos_token_ids) & set(output[:least])
    assert output == expected_output(PROMPT, 50, sampling=sampling, stop_token_ids=stops, min_tokens=least)
    assert reason is (FinishReason.LENGTH if least == 50 else FinishReason.STOP_TOKEN)


def test_min_tokens_may_be_all_tokens() -> None:
    output, reason = run(max_new=5, min_tokens=5)
    assert len(output) == 5
    assert reason is FinishReason.LENGTH


def test_a_complete_grammar_ends_the_output_before_min_tokens() -> None:
    # The grammar is complete after three tokens, and the third can only be the stop token.
    output, reason = run(grammar=toy_grammar("[a-c][d-f]x"), min_tokens=20, stop_token_ids=frozenset(b"x"))
    assert len(output) == 3
    assert reason is FinishReason.EOS_TOKEN


def test_a_forced_stop_token_before_min_tokens_does_not_end_the_output() -> None:
    output, reason = run(grammar=toy_grammar("[a-c]x[d-f]"), min_tokens=20, stop_token_ids=frozenset(b"x"))
    assert len(output) == 3
    assert reason is FinishReason.EOS_TOKEN


def test_stop_tokens_are_not_sampled_before_min_tokens_if_the_grammar_allows_others() -> None:
    grammar = toy_grammar("[a-z]+")
    output, _ = run(grammar=grammar, sampling=DRAWN, min_tokens=30, stop_token_ids=frozenset(b"aeiou"))
    assert len(output) > 30
    assert not set(output[:30]) & {*b"aeiou", *TOY_FACTS.eos_token_ids}


def test_a_stop_token_ends_an_output_whose_grammar_is_not_complete() -> None:
    output, reason = run(grammar=toy_grammar("ab.{40}"), stop_token_ids=frozenset(b"b"))
    assert bytes(output) == b"ab"
    assert reason is FinishReason.STOP_TOKEN


@pytest.mark.parametrize("count", [1, 5, 12])
def test_a_resumed_sequence_counts_its_earlier_output(count: int) -> None:
    stops = frozenset(range(97, 110))
    fields: dict[str, Any] = {"sampling": DRAWN, "stop_token_ids": stops, "min_tokens": 12}
    whole = expected_output(PROMPT, 50, **fields)
    assert len(whole) > 12
    resumed, reason = run([*PROMPT, *whole[:count]], prompt_length=len(PROMPT), max_new=50 - count, **fields)
    assert whole[:count] + resumed == whole
    assert reason is FinishReason.STOP_TOKEN


def test_each_sequence_of_a_batch_has_its_own_stops() -> None:
    driver = EngineDriver()
    stops = {key: frozenset(range(97 + 5 * key, 102 + 5 * key)) for key in range(4)}
    driver.prefill(*(first_chunk(key, PROMPT, sampling=DRAWN, stop_token_ids=stops[key]) for key in stops))
    driver.decode(list(stops))
    for key, output in driver.output.items():
        assert output == expected_output(PROMPT, 50, sampling=DRAWN, stop_token_ids=stops[key])
