"""Outputs on the toy model, whose correct outputs are known: batches, chunks, copies, resumption, stops, failures."""

from typing import Any

import pytest

from caravan_proto.errors import ShardError
from caravan_proto.messages.commands import Decode, Header, PrefixCopy
from caravan_proto.messages.limits import KvLayout
from caravan_proto.messages.results import FinishReason, StepOutcome
from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.backends.base import DecodeOutcome, TokenBatch
from caravan_shard.backends.toy.backend import ToyBackend
from caravan_shard.backends.toy.model import EOS, TOY_FACTS
from caravan_shard.protocol.results import Refusal, StepResult
from caravan_testing.shard_builders import EngineDriver, first_chunk, next_chunk, toy_grammar, toy_prompt
from caravan_testing.toy_oracle import expected_output

SAMPLED = SamplingParams(
    temperature=0.9,
    top_k=40,
    top_p=0.95,
    repetition_penalty=1.2,
    frequency_penalty=0.3,
    presence_penalty=0.2,
    repeat_last_n=20,
    dry_multiplier=0.8,
    xtc_probability=0.4,
    xtc_threshold=0.05,
    seed=11,
)

PROMPT = toy_prompt("a prompt")
DRAWN = SamplingParams(temperature=0.9, top_k=60, seed=4)


@pytest.fixture(params=list(KvLayout), ids=lambda layout: layout.value)
def layout(request: pytest.FixtureRequest) -> KvLayout:
    """Each layout in turn."""
    assert isinstance(request.param, KvLayout)
    return request.param


def test_sequences_in_one_batch_have_the_output_that_each_has_alone(layout: KvLayout) -> None:
    driver = EngineDriver(ToyBackend(layout=layout))
    prompts = {key: toy_prompt(f"prompt number {key} " * (key + 1)) for key in range(5)}
    driver.prefill(*(first_chunk(key, prompt) for key, prompt in prompts.items()))
    driver.decode(list(prompts))
    assert driver.output == {key: expected_output(prompt, 50) for key, prompt in prompts.items()}


def test_sampled_tokens_do_not_depend_on_other_sequences_in_the_batch() -> None:
    prompt = toy_prompt("once upon a time")
    driver = EngineDriver(sampling_threads=3)
    driver.prefill(first_chunk(3, prompt, sampling=SAMPLED), first_chunk(1, toy_prompt("other"), temperature=1.0))
    driver.prefill(first_chunk(2, toy_prompt("more"), temperature=0.5, seed=3), riders=[3])
    driver.decode([1, 2, 3])
    assert driver.output[3] == expected_output(prompt, 50, sampling=SAMPLED)
    assert driver.output[1] == expected_output(toy_prompt("other"), 50, sampling=SamplingParams(temperature=1.0))


def test_a_prompt_in_chunks_with_riders_has_the_same_output(layout: KvLayout) -> None:
    driver = EngineDriver(ToyBackend(layout=layout))
    prompt = toy_prompt("a long prompt that comes in three chunks")
    driver.prefill(first_chunk(0, toy_prompt("rider"), ignore_eos=True))
    driver.prefill(first_chunk(5, prompt[:10], total=len(prompt), last=False), riders=[0])
    result = driver.prefill(next_chunk(5, 10, prompt[10:11], last=False), riders=[0])
    assert result.rows.sequence_ids == [0]
    result = driver.prefill(next_chunk(5, 11, prompt[11:]), riders=[0])
    assert result.rows.sequence_ids == [0, 5]
    driver.decode([0, 5])
    assert driver.output[5] == expected_output(prompt, 50)
    assert driver.output[0] == expected_output(toy_prompt("rider"), 50, ignore_eos=True)


def test_a_copied_prefix_continues_like_a_computed_one(layout: KvLayout) -> None:
    driver = EngineDriver(ToyBackend(layout=layout))
    prefix, tails = toy_prompt("you are a helpful assistant. "), [toy_prompt("first"), toy_prompt("second")]
    driver.prefill(first_chunk(0, prefix + tails[0], sampling=SAMPLED))
    # The source advances in the same step that copies from it.
    driver.prefill(
        first_chunk(1, tails[1], copy=PrefixCopy(source_id=0, length=len(prefix)), sampling=SAMPLED), riders=[0]
    )
    driver.decode([0, 1])
    assert driver.output[0] == expected_output(prefix + tails[0], 50, sampling=SAMPLED)
    assert driver.output[1] == expected_output(prefix + tails[1], 50, sampling=SAMPLED)


def test_shared_cells_count_once_and_outlive_their_source() -> None:
    driver = EngineDriver(ToyBackend(cells=100))
    driver.prefill(first_chunk(0, toy_prompt("x" * 40)))
    driver.prefill(first_chunk(1, toy_prompt("y" * 10), copy=PrefixCopy(source_id=0, length=30)))
    driver.prefill(first_chunk(2, toy_prompt("z" * 5), copy=PrefixCopy(source_id=1, length=35)))
    assert driver.keep(0, 1, 2).free_cells == 100 - 40 - 10 - 5
    assert driver.keep(1, 2).free_cells == 100 - 30 - 10 - 5
    assert driver.keep(2).free_cells == 100 - 35 - 5
    assert driver.engine.free_cells == 100 - driver.backend.cache.used
    assert driver.keep().free_cells == 100


def test_a_split_cache_counts_a_copy_for_each_sequence() -> None:
    driver = EngineDriver(ToyBackend(cells=400, max_sequences=4, layout=KvLayout.SPLIT))
    driver.prefill(first_chunk(0, toy_prompt("x" * 40)))
    driver.prefill(first_chunk(1, toy_prompt("y" * 10), copy=PrefixCopy(source_id=0, length=30)))
    assert driver.keep(0, 1).free_cells == 400 - 40 - 40


def test_a_resumed_sequence_continues_as_if_uninterrupted() -> None:
    prompt = toy_prompt("to be resumed")
    whole = expected_output(prompt, 40, sampling=SAMPLED, ignore_eos=True)
    driver = EngineDriver()
    earlier = whole[:15]
    driver.prefill(
        first_chunk(0, prompt + earlier, prompt_length=len(prompt), max_new=25, sampling=SAMPLED, ignore_eos=True)
    )
    driver.decode([0])
    assert driver.output[0] == whole[15:]
    assert whole[15:] == expected_output(prompt, 25, sampling=SAMPLED, ignore_eos=True, earlier_output=earlier)


def test_the_end_token_ends_a_sequence_which_keeps_its_cells_until_released() -> None:
    prompt = next(
        prompt
        for prompt in (toy_prompt(f"prompt {number}") for number in range(1_000))
        if 3 <= len(expected_output(prompt, 30)) < 20
    )
    expected = expected_output(prompt, 30)
    driver = EngineDriver()
    driver.prefill(first_chunk(4, prompt, max_new=30))
    results = driver.decode([4])
    assert driver.output[4] == expected
    assert results[-1].rows.finish_reasons == [FinishReason.EOS_TOKEN]
    assert results[-1].rows.specials == [True]
    assert all(result.rows.finish_reasons == [None] for result in results[:-1])
    held = driver.engine.free_cells
    # A command may list an ended sequence, which does not advance.
    assert driver.decode([4]) == []
    result = driver.prefill(first_chunk(5, toy_prompt("new")), riders=[4])
    assert result.rows.sequence_ids == [5]
    assert driver.keep(5).free_cells == held + len(prompt) + len(expected) - 1 - 3


def test_max_length_ends_a_sequence_with_its_last_token() -> None:
    driver = EngineDriver()
    result = driver.prefill(first_chunk(0, toy_prompt("abc"), max_new=1, ignore_eos=True))
    assert result.rows.finish_reasons == [FinishReason.LENGTH]
    assert driver.decode([0]) == []


def test_a_step_without_tokens_is_ok_and_releases() -> None:
    driver = EngineDriver()
    driver.prefill(first_chunk(0, toy_prompt("abc")))
    result = driver.prefill(release=[0])
    assert result.rows.token_ids == []
    assert driver.engine.sequence_count == 0
    assert driver.engine.step_count == 1


def test_a_full_cache_is_a_result_that_changes_nothing() -> None:
    driver = EngineDriver(ToyBackend(cells=60))
    prompt = toy_prompt("p" * 30)
    driver.prefill(first_chunk(0, prompt, ignore_eos=True, max_new=25))
    copied = first_chunk(1, toy_prompt("q" * 40), copy=PrefixCopy(source_id=0, length=10), max_new=5)
    result = driver.try_prefill(copied, riders=[0])
    assert isinstance(result, StepResult)
    assert result.outcome is StepOutcome.NO_KV
    assert result.rows.token_ids == []
    assert driver.engine.sequence_count == 1
    assert driver.backend.cache.used == 30
    driver.decode([0])
    assert driver.output[0] == expected_output(prompt, 25, ignore_eos=True)


@pytest.mark.parametrize(
    ("outcome", "answer"),
    [
        (DecodeOutcome.NO_KV, StepOutcome.NO_KV),
        (DecodeOutcome.ABORTED, StepOutcome.ABORTED),
        (DecodeOutcome.INVALID, ShardError.FORWARD_FAILED),
        (DecodeOutcome.FAILED, ShardError.FORWARD_FAILED),
    ],
)
def test_a_failed_step_changes_nothing(
    outcome: DecodeOutcome, answer: StepOutcome | ShardError, layout: KvLayout
) -> None:
    backend = ToyBackend(layout=layout)
    driver = EngineDriver(backend)
    prompt, half = toy_prompt("a running sequence"), toy_prompt("half of a prompt and the rest")
    driver.prefill(first_chunk(0, prompt), first_chunk(2, half[:9], total=len(half), last=False))
    driver.decode([0], steps=3)
    used = backend.cache.used
    fail_once = iter([outcome])
    backend.hook = lambda _batch: next(fail_once, None)

    chunks = (next_chunk(2, 9, half[9:]), first_chunk(1, toy_prompt("b"), copy=PrefixCopy(source_id=0, length=5)))
    result = driver.try_prefill(*chunks, riders=[0])

    if isinstance(answer, StepOutcome):
        assert isinstance(result, StepResult)
        assert result.outcome is answer
        assert driver.engine.failures_in_a_row == 0
    else:
        assert isinstance(result, Refusal)
        assert result.error is answer
        assert driver.engine.failures_in_a_row == 1
    assert backend.cache.used == used
    assert driver.engine.sequence_count == 2
    # The same command succeeds when repeated, and every output is as if nothing had failed.
    driver.prefill(*chunks, riders=[0])
    assert driver.engine.failures_in_a_row == 0
    driver.decode([0, 1, 2])
    assert driver.output[0] == expected_output(prompt, 50)
    assert driver.output[2] == expected_output(half, 50)
    assert driver.output[1] == expected_output([*prompt[:5], *toy_prompt("b")], 50)


def test_rows_of_a_batch_are_in_order_of_sequence_ids() -> None:
    seen: list[list[int]] = []

    def note(batch: TokenBatch) -> None:
        seen.append(batch.sequence_ids.tolist())

    driver = EngineDriver(ToyBackend(hook=note))
    driver.prefill(first_chunk(5, toy_prompt("ab"), ignore_eos=True), first_chunk(1, toy_prompt("c"), ignore_eos=True))
    driver.prefill(first_chunk(3, toy_prompt("de"), ignore_eos=True), riders=[5, 1])
    driver.decode([5, 3, 1], steps=1)
    assert seen == [[1, 5, 5], [1, 3, 3, 5], [1, 3, 5]]


def test_timings_show_where_a_step_spent_its_time() -> None:
    driver = EngineDriver(ToyBackend(step_s=0.01, token_s=0.001))
    timings = driver.prefill(first_chunk(0, toy_prompt("0123456789"))).timings
    assert timings.forward_ns >= 20_000_000
    assert timings.total_ns >= timings.forward_ns + timings.sample_ns


def test_a_refused_decode_releases_nothing() -> None:
    driver = EngineDriver()
    driver.prefill(first_chunk(0, toy_prompt("abc")))
    refusal = driver.engine.begin_decode(Decode(sequence_ids=[0], max_steps=5, header=Header(release=[0])))
    assert isinstance(refusal, Refusal)
    assert refusal.error is ShardError.UNKNOWN_SEQUENCE
    assert driver.engine.sequence_count == 1


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
