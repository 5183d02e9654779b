"""Outputs that begin with a thought, on the toy model: its end by force, and a grammar behind it."""

from typing import Any

import pytest

from caravan_proto.messages.constraint import Thought
from caravan_proto.messages.results import FinishReason
from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.backends.toy.model import EOS, TOY_FACTS
from caravan_shard.protocol.results import Refusal
from caravan_testing.shard_builders import EngineDriver, first_chunk, toy_grammar, toy_prompt, with_parameters
from caravan_testing.toy_oracle import expected_output

PROMPT = toy_prompt("a prompt<think>")
DRAWN = SamplingParams(temperature=0.9, top_k=60, repetition_penalty=1.1, seed=4)
ENDING = tuple(b"</think>\n\n")
NEVER = b"\xff\xfe</think>"


def run(prompt: list[int] = PROMPT, drafts: int = 0, **fields: Any) -> tuple[list[int], FinishReason | None]:
    """Run one sequence to its end; return its output and finish reason."""
    driver = EngineDriver()
    chunk = with_parameters(first_chunk(2, prompt, ignore_eos=True, **fields), max_draft_tokens=drafts)
    results = [driver.prefill(chunk), *driver.decode([2], max_draft_tokens=drafts)]
    return driver.output[2], results[-1].rows.finish_reasons[-1]


def free_output(count: int = 50, earlier: list[int] | None = None, min_tokens: int = 0) -> list[int]:
    return expected_output(
        PROMPT, count, sampling=DRAWN, ignore_eos=True, earlier_output=earlier or [], min_tokens=min_tokens
    )


@pytest.mark.parametrize("budget", [0, 1, 2, 7, 30])
@pytest.mark.parametrize("drafts", [0, 4])
def test_a_thought_ends_by_force_when_its_tokens_are_spent(budget: int, drafts: int) -> None:
    thought = Thought(closings=(NEVER,), ending=ENDING, max_tokens=budget)
    output, reason = run(sampling=DRAWN, thought=thought, drafts=drafts)
    before = [*free_output()[:budget], *ENDING]
    assert output[: len(before)] == before
    assert output[len(before) :] == free_output(50 - len(before), before)
    assert reason is FinishReason.LENGTH


def test_a_thought_that_the_model_ends_in_time_is_left_alone() -> None:
    free = free_output()
    # The text of three tokens, which ends with the eighth.
    closing = bytes(free[5:8])
    thought = Thought(closings=(NEVER, closing), ending=ENDING, max_tokens=8)
    assert run(sampling=DRAWN, thought=thought)[0] == free
    # The closing's last token would be one too many.
    output, _ = run(sampling=DRAWN, thought=Thought(closings=(closing,), ending=ENDING, max_tokens=7))
    assert output[: 7 + len(ENDING)] == [*free[:7], *ENDING]


def test_a_length_may_end_a_forced_ending() -> None:
    thought = Thought(closings=(NEVER,), ending=ENDING, max_tokens=3)
    output, reason = run(sampling=DRAWN, thought=thought, max_new=6)
    assert output == [*free_output()[:3], *ENDING[:3]]
    assert reason is FinishReason.LENGTH


@pytest.mark.parametrize("drafts", [0, 4])
def test_a_grammar_applies_behind_the_thought(drafts: int) -> None:
    grammar = toy_grammar("[a-c]{3}-[x-z]")
    thought = Thought(closings=(NEVER,), ending=ENDING, max_tokens=5)
    output, reason = run(sampling=DRAWN, thought=thought, grammar=grammar, drafts=drafts)
    # A grammar bars end tokens from the thought, as ``min_tokens`` does.
    before = [*free_output(min_tokens=5)[:5], *ENDING]
    assert output[: len(before)] == before
    answer = bytes(output[len(before) :]).decode()
    assert len(answer) == 5
    assert (set(answer[:3]) <= set("abc"), answer[3], answer[4] in "xyz") == (True, "-", True)
    assert reason is FinishReason.EOS_TOKEN


def test_a_thought_before_a_grammar_needs_no_budget_and_cannot_end_the_output() -> None:
    free = free_output(min_tokens=13)
    closing = bytes(free[10:13])
    driver = EngineDriver()
    grammar, thought = toy_grammar("[a-c]{4}"), Thought(closings=(closing,))
    driver.prefill(first_chunk(2, PROMPT, sampling=DRAWN, grammar=grammar, thought=thought))
    driver.decode([2])
    output = driver.output[2]
    assert output[:13] == free[:13]
    assert not TOY_FACTS.eos_token_ids & set(output[:17])
    assert set(output[13:17]) <= set(b"abc")


@pytest.mark.parametrize("count", [1, 4, 5, 6, 10, 15, 17, 19])
def test_a_sequence_that_is_computed_again_has_the_same_tokens(count: int) -> None:
    fields: dict[str, Any] = {
        "sampling": DRAWN,
        "thought": Thought(closings=(NEVER,), ending=ENDING, max_tokens=5),
        "grammar": toy_grammar("[a-z]{5}"),
    }
    whole, _ = run(**fields)
    assert len(whole) == 20
    resumed, reason = run([*PROMPT, *whole[:count]], prompt_length=len(PROMPT), max_new=50 - count, **fields)
    assert whole[:count] + resumed == whole
    assert reason is FinishReason.EOS_TOKEN


def test_sequences_with_and_without_thoughts_share_steps() -> None:
    driver = EngineDriver()
    thoughts = {key: Thought(closings=(NEVER,), ending=ENDING, max_tokens=key) for key in range(1, 4)}
    chunks = [first_chunk(key, PROMPT, sampling=DRAWN, ignore_eos=True, thought=thoughts.get(key)) for key in range(4)]
    driver.prefill(*chunks)
    driver.decode(range(4))
    assert driver.output[0] == free_output()
    for key in thoughts:
        assert driver.output[key] == run(sampling=DRAWN, thought=thoughts[key])[0]


@pytest.mark.parametrize(
    ("thought", "reason"),
    [
        (Thought(closings=()), "closings"),
        (Thought(closings=(b"",)), "closings"),
        (Thought(closings=(b"x",) * 9), "closings"),
        (Thought(closings=(b"x" * 129,)), "at most 128"),
        (Thought(closings=(b"x",), ending=(1,) * 129), "at most 128"),
        (Thought(closings=(b"x",), ending=(TOY_FACTS.vocabulary_size,)), "ending_token_ids"),
        (Thought(closings=(b"x",), max_tokens=3), "needs ending_token_ids"),
    ],
)
def test_a_wrong_thought_is_refused(thought: Thought, reason: str) -> None:
    refusal = EngineDriver().try_prefill(first_chunk(0, PROMPT, thought=thought))
    assert isinstance(refusal, Refusal)
    assert reason in refusal.sentence


def test_the_end_token_may_end_a_thought_without_a_grammar() -> None:
    thought = Thought(closings=(NEVER,), ending=ENDING, max_tokens=200)
    for seed in range(20):
        sampling = SamplingParams(temperature=1.0, seed=seed)
        expected = expected_output(PROMPT, 200, sampling=sampling)
        if expected[-1] != EOS:
            continue
        driver = EngineDriver()
        driver.prefill(first_chunk(0, PROMPT, sampling=sampling, max_new=200, thought=thought))
        driver.decode([0])
        assert driver.output[0] == expected
        return
    pytest.fail("no output ended")


@pytest.mark.parametrize("drafts", [0, 4])
def test_behind_an_end_by_force_another_thought_ends_at_once(drafts: int) -> None:
    before = [*free_output()[:2], *ENDING]
    answer = free_output(50 - len(before), before)
    opening = bytes(answer[3:6])
    thought = Thought(closings=(NEVER,), ending=ENDING, max_tokens=2, opening=opening)
    output, _ = run(sampling=DRAWN, thought=thought, drafts=drafts)
    again = [*before, *answer[:6], *ENDING]
    assert output[: len(again)] == again
    # One that the model ended itself is not watched.
    closed = Thought(closings=(bytes(free_output()[:1]),), ending=ENDING, max_tokens=2, opening=opening)
    assert run(sampling=DRAWN, thought=closed, drafts=drafts)[0] == free_output()
