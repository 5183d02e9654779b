"""Constrained sequences on the toy backend, also behind a thought: choosing tokens, ending, preemption and failures."""

import itertools
import json
import re
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest

from caravan_proto.messages.commands import Decode, PrefixCopy
from caravan_proto.messages.constraint import Constraint, ConstraintKind, Thought
from caravan_proto.messages.limits import KvLayout
from caravan_proto.messages.results import FinishReason, StepOutcome
from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.backends.base import DecodeOutcome
from caravan_shard.backends.toy.backend import ToyBackend
from caravan_shard.backends.toy.model import EOS, TOY_FACTS, TURN_END
from caravan_shard.constraints.grammar import Grammar
from caravan_shard.engine.engine import Engine
from caravan_shard.protocol.results import Refusal, StepResult
from caravan_shard.sampling.choice import Allowed, Choice, choose_token
from caravan_shard.sampling.filters import filter_candidates
from caravan_shard.sampling.penalties import OccurrencePenalty, make_biases
from caravan_shard.sampling.sampler import Sampler
from caravan_shard.sequences.runs import RunStore
from caravan_shard.sequences.sequence import Phase
from caravan_testing.random_schemas import random_schema
from caravan_testing.shard_builders import (
    EngineDriver,
    Grammars,
    Job,
    first_chunk,
    load_entry,
    next_chunk,
    run_jobs,
    save_entry,
    toy_grammar,
    toy_prompt,
    with_parameters,
)
from caravan_testing.toy_oracle import expected_output

DRAWN = SamplingParams(temperature=1.0, seed=5, repetition_penalty=1.2, top_k=60)
PROMPT = toy_prompt("a prompt")

QUESTION = toy_prompt("a prompt<think>")
SEEDED = SamplingParams(temperature=0.9, top_k=60, repetition_penalty=1.1, seed=4)
ENDING = tuple(b"</think>\n\n")
NEVER = b"\xff\xfe</think>"

SCHEMAS = 500


def biased(**by_token: float) -> tuple[tuple[int, float], ...]:
    """Return biases for tokens that are given as characters."""
    return tuple((ord(key), value) for key, value in by_token.items())


def finish(results: list[StepResult]) -> list[FinishReason | None]:
    return [reason for result in results for reason in result.rows.finish_reasons]


def text(tokens: list[int]) -> str:
    return bytes(token for token in tokens if token < 256).decode()


# -- choosing


def test_biases_come_before_penalties_and_both_before_the_grammar() -> None:
    logits = np.array([1.0, 2.0, 3.0, 4.0], np.float32)
    before = logits.copy()
    # 1 + 9 = 10, halved by the penalty: 5. The other way around it would be 0.5 + 9.
    parameters = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    penalty = OccurrencePenalty(parameters)
    penalty.add([0], output=True)
    choice = Choice(parameters, 0, [penalty], biases=make_biases([(0, 9.0), (1, 7.5)]))
    assert choose_token(logits, choice, filter_candidates) == 1
    assert choose_token(logits, replace(choice, allowed=Allowed.of([0, 2, 3])), filter_candidates) == 0
    assert choose_token(logits, replace(choice, allowed=Allowed.of([2])), filter_candidates) == 2
    assert (logits == before).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_bias_makes_a_forbidden_token_allowed(temperature: float) -> None:
    logits = np.zeros(500, np.float32)
    choice = Choice(SamplingParams(temperature=temperature, top_p=0.9), 0, biases=make_biases([(3, 100.0)]))
    assert choose_token(logits, choice, filter_candidates) == 3
    allowed = replace(choice, allowed=Allowed.of([7, 9]))
    assert choose_token(logits, allowed, filter_candidates) in (7, 9)


@pytest.mark.parametrize("logit", [np.nan, -np.inf, np.inf])
@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {}, {"top_k": 3}])
def test_a_forbidden_token_is_never_chosen_whatever_its_logit(logit: float, fields: dict[str, Any]) -> None:
    logits = np.full(500, logit, np.float32)
    logits[0] = 50.0
    allowed = Allowed.of([7, 9, 11])
    with np.errstate(invalid="ignore"):
        token = choose_token(logits, Choice(SamplingParams(**fields), 0, (), allowed), filter_candidates)
    assert token in (7, 9, 11)


def test_a_draw_is_the_same_when_everything_is_allowed() -> None:
    logits = np.random.default_rng(1).standard_normal(5_000).astype(np.float32)
    for fields in ({}, {"top_k": 40}, {"top_p": 0.8}, {"min_p": 0.1}):
        for seed in range(20):
            parameters = SamplingParams(temperature=1.0, seed=seed, **fields)
            free = choose_token(logits, Choice(parameters, 3), filter_candidates)
            assert (
                choose_token(logits, Choice(parameters, 3, (), Allowed.of(np.arange(5_000))), filter_candidates) == free
            )


def test_a_batch_mixes_biased_constrained_and_plain_rows() -> None:
    logits = np.tile(np.arange(10, dtype=np.float32), (4, 1))
    choices = [
        Choice(SamplingParams(temperature=0.0), 0),
        Choice(SamplingParams(temperature=0.0), 0, biases=make_biases([(2, 50.0)])),
        Choice(SamplingParams(temperature=0.0), 0, (), Allowed.of([4, 5])),
        Choice(SamplingParams(temperature=0.0), 0),
    ]
    for threads in (1, 2):
        sampler = Sampler(filter_candidates, threads)
        assert sampler.choose(logits, choices) == [9, 2, 5, 9]
        sampler.close()


def test_log_probabilities_are_the_models_own() -> None:
    plain, constrained = EngineDriver(), EngineDriver()
    free = plain.prefill(first_chunk(0, PROMPT, logprobs=True, top_n_tokens=3))
    sampling = SamplingParams(temperature=0.0, logprobs=True, top_n_tokens=3, biases=biased(q=50.0))
    bound = constrained.prefill(first_chunk(0, PROMPT, sampling=sampling, grammar=toy_grammar("[xz]+")))
    assert chr(bound.rows.token_ids[0]) in "xz"
    assert free.rows.top_token_ids == bound.rows.top_token_ids
    assert free.rows.top_logprobs == bound.rows.top_logprobs
    assert bound.rows.logprobs[0] < free.rows.logprobs[0]


def test_a_bias_decides_between_tokens_that_the_grammar_allows() -> None:
    driver = EngineDriver()
    sampling = SamplingParams(temperature=0.0, biases=biased(b=60.0, c=90.0, d=30.0))
    driver.prefill(first_chunk(0, PROMPT, sampling=sampling, grammar=toy_grammar("[a-b]{5}")))
    driver.decode([0])
    assert text(driver.output[0]) == "bbbbb"


# -- ending


def test_an_output_ends_with_its_last_token_when_nothing_can_follow() -> None:
    for ignore_eos in (False, True):
        driver = EngineDriver()
        driver.prefill(first_chunk(0, PROMPT, grammar=toy_grammar("abc"), ignore_eos=ignore_eos))
        results = driver.decode([0])
        assert text(driver.output[0]) == "abc"
        assert len(driver.output[0]) == 3
        assert finish(results) == [None, FinishReason.EOS_TOKEN]


def test_end_tokens_are_allowed_only_where_the_output_may_end() -> None:
    grammar = toy_grammar("(ab)+")
    for end in (EOS, TURN_END):
        # The end token would win everywhere.
        sampling = SamplingParams(temperature=0.0, biases=((end, 100.0),))
        driver = EngineDriver()
        driver.prefill(first_chunk(0, PROMPT, sampling=sampling, grammar=grammar))
        results = driver.decode([0])
        assert driver.output[0] == [*b"ab", end]
        assert finish(results)[-1] is FinishReason.EOS_TOKEN


def test_ignored_end_tokens_are_sampled_only_when_nothing_else_is_allowed() -> None:
    sampling = SamplingParams(temperature=0.0, biases=((EOS, 100.0), (TURN_END, 99.0)))
    driver = EngineDriver()
    driver.prefill(
        first_chunk(0, PROMPT, sampling=sampling, grammar=toy_grammar("(ab)+"), ignore_eos=True, max_new=11),
        first_chunk(1, PROMPT, sampling=sampling, grammar=toy_grammar(""), ignore_eos=True),
    )
    results = driver.decode([0, 1])
    assert text(driver.output[0]) == "abababababa"
    assert finish(results)[-1] is FinishReason.LENGTH
    assert driver.output[1] == [EOS]


def test_max_length_ends_an_output_whose_grammar_is_not_complete() -> None:
    driver = EngineDriver()
    driver.prefill(first_chunk(0, PROMPT, grammar=toy_grammar("[a-z]{100}"), max_new=4))
    assert finish(driver.decode([0]))[-1] is FinishReason.LENGTH
    assert re.fullmatch("[a-z]{4}", text(driver.output[0]))


def test_a_failed_grammar_ends_its_sequence_and_no_other() -> None:
    """Earlier output that does not match can only come from a faulty router."""
    driver = EngineDriver()
    result = driver.prefill(
        first_chunk(0, [*PROMPT, *b"not a number"], prompt_length=len(PROMPT), grammar=toy_grammar("[0-9]+")),
        first_chunk(1, PROMPT),
    )
    assert result.rows.finish_reasons == [FinishReason.CONSTRAINT_FAILED, None]
    assert driver.output[0] == [min(TOY_FACTS.eos_token_ids)]
    driver.decode([0, 1])
    assert len(driver.output[0]) == 1
    assert driver.output[1] == expected_output(PROMPT, 50)


# -- preemption, failures and resumption

GRAMMARS = {
    "regex": ("[a-c]{3}(x|yy|zzz)+[0-9]{2,9}", ConstraintKind.REGEX),
    "schema": (
        json.dumps(
            {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 9999}, "minItems": 5, "maxItems": 9}
        ),
        ConstraintKind.JSON_SCHEMA,
    ),
    "lark": ('start: item+ "."\nitem: "<" item* ">" | /[a-z]{1,4}/ ";"', ConstraintKind.LARK),
    "gbnf": ('root ::= item+ "."\nitem ::= "<" item* ">" | [a-z]+ ";"', ConstraintKind.GBNF),
}


@pytest.fixture(params=GRAMMARS)
def grammar(request: pytest.FixtureRequest) -> Grammar:
    return toy_grammar(*GRAMMARS[request.param])


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0), DRAWN], ids=["greedy", "drawn"])
def test_sequences_of_one_grammar_do_not_disturb_each_other(grammar: Grammar, sampling: SamplingParams) -> None:
    driver = EngineDriver(sampling_threads=2)
    prompts = [toy_prompt(f"prompt {key}") for key in range(6)]
    grammars = [grammar if key % 2 else None for key in range(6)]
    driver.prefill(
        *(first_chunk(key, prompts[key], sampling=sampling, grammar=grammars[key], ignore_eos=True) for key in range(6))
    )
    driver.decode(range(6))
    for key in range(6):
        expected = expected_output(prompts[key], 50, sampling=sampling, grammar=grammars[key], ignore_eos=True)
        assert driver.output[key] == expected


@pytest.mark.parametrize("count", [1, 4, 7])
def test_a_resumed_sequence_continues_in_its_grammar(grammar: Grammar, count: int) -> None:
    whole = expected_output(PROMPT, 40, sampling=DRAWN, grammar=grammar)
    known = [*PROMPT, *whole[:count]]
    driver = EngineDriver()
    for cut in (3, len(PROMPT), len(known) - 1):
        driver.prefill(
            first_chunk(
                0,
                known[:cut],
                total=len(known),
                prompt_length=len(PROMPT),
                last=False,
                sampling=DRAWN,
                grammar=grammar,
                max_new=40 - count,
            )
        )
        driver.prefill(next_chunk(0, cut, known[cut:]))
        driver.decode([0])
        assert driver.output[0] == whole[count:]
        driver.keep()


@pytest.mark.parametrize("layout", KvLayout)
def test_a_grammar_survives_preemption_failed_steps_and_a_shared_prompt(grammar: Grammar, layout: KvLayout) -> None:
    whole = expected_output(PROMPT, 40, sampling=DRAWN, grammar=grammar)
    outcomes = itertools.cycle([DecodeOutcome.NO_KV, DecodeOutcome.ABORTED, None])
    driver = EngineDriver(ToyBackend(layout=layout))
    driver.prefill(first_chunk(1, PROMPT, max_new=2))
    driver.backend.hook = lambda _batch: next(outcomes)
    chunk = first_chunk(
        0,
        PROMPT[4:],
        copy=PrefixCopy(source_id=1, length=4),
        prompt_length=len(PROMPT),
        sampling=DRAWN,
        grammar=grammar,
        max_new=40,
    )
    # The step fails twice, then succeeds when repeated.
    for expected in (StepOutcome.NO_KV, StepOutcome.ABORTED):
        result = driver.try_prefill(chunk)
        assert isinstance(result, StepResult)
        assert result.outcome is expected
    driver.prefill(chunk)
    output = driver.output[0]
    while driver.engine._pool.held[0].phase is not Phase.ENDED:
        # Preempted and resumed: the grammar reads the output so far again.
        known = [*PROMPT, *output]
        assert driver.save(save_entry(0, known[:-1], release=True)) == [True]
        assert driver.load(load_entry(0, known[:-1])) == [True]
        resumed = first_chunk(
            0,
            known[-1:],
            copy=PrefixCopy(source_id=0, length=len(known) - 1),
            prompt_length=len(PROMPT),
            sampling=DRAWN,
            grammar=grammar,
            max_new=40 - len(output),
        )
        result = driver.try_prefill(resumed)
        while isinstance(result, StepResult) and result.outcome is not StepOutcome.OK:
            result = driver.try_prefill(resumed)
        assert isinstance(result, StepResult)
        output += result.rows.token_ids
        for _ in range(3):
            assert driver.engine.begin_decode(Decode(sequence_ids=[0], max_steps=1)) is None
            step = driver.engine.decode_step([0], 0)
            if step is None:
                break
            assert isinstance(step, StepResult)
            if step.outcome is StepOutcome.OK:
                output += step.rows.token_ids
    assert output == whole


def test_a_last_chunk_that_failed_may_be_sent_again_with_other_tokens() -> None:
    outcomes = iter([None, DecodeOutcome.NO_KV, None, None])
    driver = EngineDriver(ToyBackend(hook=lambda _batch: next(outcomes)))
    grammar = toy_grammar("(one|two)!")
    driver.prefill(
        first_chunk(0, PROMPT, total=len(PROMPT) + 2, prompt_length=len(PROMPT), last=False, grammar=grammar)
    )
    failed = driver.try_prefill(next_chunk(0, len(PROMPT), toy_prompt("on")))
    assert isinstance(failed, StepResult)
    assert failed.outcome is StepOutcome.NO_KV
    driver.prefill(next_chunk(0, len(PROMPT), toy_prompt("tw")))
    assert text(driver.output[0]) == "o"
    driver.backend.hook = None
    driver.decode([0])
    assert text(driver.output[0]) == "o!"


def test_ended_and_parked_sequences_release_the_state_of_their_grammar() -> None:
    driver = EngineDriver()
    driver.prefill(first_chunk(0, PROMPT, grammar=toy_grammar("ab")), first_chunk(1, PROMPT, grammar=toy_grammar("a+")))
    driver.decode([0])
    held = driver.engine._pool.held
    assert held[0].matching is None
    assert held[1].matching is not None
    driver.try_prefill(first_chunk(2, PROMPT), park={1: 3})
    assert held[1].matching is None


def run(prompt: list[int] = QUESTION, drafts: int = 0, **fields: Any) -> tuple[list[int], FinishReason | None]:
    """Run one sequence to its end; return its output and finish reason."""
    driver = EngineDriver()
    chunk = with_parameters(first_chunk(2, prompt, ignore_eos=True, **fields), max_draft_tokens=drafts)
    results = [driver.prefill(chunk), *driver.decode([2], max_draft_tokens=drafts)]
    return driver.output[2], results[-1].rows.finish_reasons[-1]


def free_output(count: int = 50, earlier: list[int] | None = None, min_tokens: int = 0) -> list[int]:
    return expected_output(
        QUESTION,
        count,
        sampling=SEEDED,
        ignore_eos=True,
        earlier_output=earlier or [],
        min_tokens=min_tokens,
    )


@pytest.mark.parametrize("budget", [0, 1, 2, 7, 30])
@pytest.mark.parametrize("drafts", [0, 4])
def test_a_thought_ends_by_force_when_its_tokens_are_spent(budget: int, drafts: int) -> None:
    thought = Thought(closings=(NEVER,), ending=ENDING, max_tokens=budget)
    output, reason = run(sampling=SEEDED, thought=thought, drafts=drafts)
    before = [*free_output()[:budget], *ENDING]
    assert output[: len(before)] == before
    assert output[len(before) :] == free_output(50 - len(before), before)
    assert reason is FinishReason.LENGTH


def test_a_thought_that_the_model_ends_in_time_is_left_alone() -> None:
    free = free_output()
    # The text of three tokens, which ends with the eighth.
    closing = bytes(free[5:8])
    thought = Thought(closings=(NEVER, closing), ending=ENDING, max_tokens=8)
    assert run(sampling=SEEDED, thought=thought)[0] == free
    # The closing's last token would be one too many.
    output, _ = run(sampling=SEEDED, thought=Thought(closings=(closing,), ending=ENDING, max_tokens=7))
    assert output[: 7 + len(ENDING)] == [*free[:7], *ENDING]


def test_a_length_may_end_a_forced_ending() -> None:
    thought = Thought(closings=(NEVER,), ending=ENDING, max_tokens=3)
    output, reason = run(sampling=SEEDED, thought=thought, max_new=6)
    assert output == [*free_output()[:3], *ENDING[:3]]
    assert reason is FinishReason.LENGTH


@pytest.mark.parametrize("drafts", [0, 4])
def test_a_grammar_applies_behind_the_thought(drafts: int) -> None:
    grammar = toy_grammar("[a-c]{3}-[x-z]")
    thought = Thought(closings=(NEVER,), ending=ENDING, max_tokens=5)
    output, reason = run(sampling=SEEDED, thought=thought, grammar=grammar, drafts=drafts)
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
    driver.prefill(first_chunk(2, QUESTION, sampling=SEEDED, grammar=grammar, thought=thought))
    driver.decode([2])
    output = driver.output[2]
    assert output[:13] == free[:13]
    assert not TOY_FACTS.eos_token_ids & set(output[:17])
    assert set(output[13:17]) <= set(b"abc")


@pytest.mark.parametrize("count", [1, 4, 5, 6, 10, 15, 17, 19])
def test_a_sequence_that_is_computed_again_has_the_same_tokens(count: int) -> None:
    fields: dict[str, Any] = {
        "sampling": SEEDED,
        "thought": Thought(closings=(NEVER,), ending=ENDING, max_tokens=5),
        "grammar": toy_grammar("[a-z]{5}"),
    }
    whole, _ = run(**fields)
    assert len(whole) == 20
    resumed, reason = run([*QUESTION, *whole[:count]], prompt_length=len(QUESTION), max_new=50 - count, **fields)
    assert whole[:count] + resumed == whole
    assert reason is FinishReason.EOS_TOKEN


def test_sequences_with_and_without_thoughts_share_steps() -> None:
    driver = EngineDriver()
    thoughts = {key: Thought(closings=(NEVER,), ending=ENDING, max_tokens=key) for key in range(1, 4)}
    chunks = [
        first_chunk(key, QUESTION, sampling=SEEDED, ignore_eos=True, thought=thoughts.get(key)) for key in range(4)
    ]
    driver.prefill(*chunks)
    driver.decode(range(4))
    assert driver.output[0] == free_output()
    for key in thoughts:
        assert driver.output[key] == run(sampling=SEEDED, thought=thoughts[key])[0]


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
    refusal = EngineDriver().try_prefill(first_chunk(0, QUESTION, thought=thought))
    assert isinstance(refusal, Refusal)
    assert reason in refusal.sentence


def test_the_end_token_may_end_a_thought_without_a_grammar() -> None:
    thought = Thought(closings=(NEVER,), ending=ENDING, max_tokens=200)
    for seed in range(20):
        sampling = SamplingParams(temperature=1.0, seed=seed)
        expected = expected_output(QUESTION, 200, sampling=sampling)
        if expected[-1] != EOS:
            continue
        driver = EngineDriver()
        driver.prefill(first_chunk(0, QUESTION, sampling=sampling, max_new=200, thought=thought))
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
    output, _ = run(sampling=SEEDED, thought=thought, drafts=drafts)
    again = [*before, *answer[:6], *ENDING]
    assert output[: len(again)] == again
    # One that the model ended itself is not watched.
    closed = Thought(closings=(bytes(free_output()[:1]),), ending=ENDING, max_tokens=2, opening=opening)
    assert run(sampling=SEEDED, thought=closed, drafts=drafts)[0] == free_output()


def test_outputs_for_random_schemas_parse_and_validate() -> None:
    engine = Engine(ToyBackend(cells=65_536), 1, RunStore(0))
    grammars = Grammars(engine.backend)
    schemas = [random_schema(seed) for seed in range(SCHEMAS)]
    jobs = [
        Job(
            list(f"prompt {seed}".encode()),
            grammars.compile(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))),
            # The penalty ends numbers, which may have any number of digits.
            SamplingParams(temperature=1.0, frequency_penalty=0.3, seed=seed),
        )
        for seed, schema in enumerate(schemas)
    ]
    outputs = run_jobs(engine, jobs, slots=8, max_new=3_000)
    engine.close()
    for schema, output in zip(schemas, outputs, strict=True):
        assert output.finish is FinishReason.EOS_TOKEN, (schema, output)
        value = json.loads(output.data.decode())
        jsonschema.validate(value, schema, jsonschema.Draft202012Validator, format_checker=jsonschema.FormatChecker())
