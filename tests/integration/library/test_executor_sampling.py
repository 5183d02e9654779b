"""What `Conversation.sample` and `generate` do for each token, over the toy model: once what once suffices."""

import copy
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from caravan import Conversation, Executor, SamplingParams, Token
from caravan.request_bodies import generating_fields
from caravan.token_choice import KeptLogprobs
from caravan_dialects.api.openai.schema import GeneratingFields
from caravan_shard.backends.toy.backend import ToyBackend
from caravan_shard.sampling.logprobs import token_logprobs
from caravan_shard.sampling.sampler import Sampler

_REPEATING = SamplingParams(
    temperature=1.2, seed=3, repetition_penalty=1.4, presence_penalty=0.5, dry_multiplier=0.8, ignore_eos=True
)


@pytest.fixture
def executor() -> Iterator[Executor]:
    with Executor("toy.gguf", backend="fake", ctx_size=256, parallel=4, cache_ram=0) as made:
        yield made


def _prompted(executor: Executor, prompt: Any = "a prompt") -> Conversation:
    conversation = executor.create()
    conversation.prompt(prompt)
    executor.infer()
    return conversation


def _stepped(executor: Executor, conversation: Conversation, count: int) -> list[int]:
    """Sample and append by hand."""
    tokens = []
    for _ in range(count):
        token = conversation.sample(_REPEATING)
        tokens.append(token.id)
        conversation.prompt(token)
        executor.infer()
    return tokens


def test_parameters_are_checked_once(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[object] = []

    def fields_of(params: SamplingParams) -> GeneratingFields:
        checks.append(params)
        return generating_fields(params)

    monkeypatch.setattr("caravan.token_choice.generating_fields", fields_of)
    list(_prompted(executor).generate(8, _REPEATING))
    assert len(checks) == 1
    _stepped(executor, _prompted(executor), 8)
    assert len(checks) == 2


def test_a_list_of_the_parameters_may_change_between_two_samples(executor: Executor) -> None:
    bias: dict[int, float] = {}
    params = SamplingParams(temperature=0, logit_bias=bias)
    conversation = _prompted(executor)
    conversation.sample(params)
    bias[65] = 100.0
    assert conversation.sample(params).id == 65


def test_without_a_seed_each_sample_is_another_one(executor: Executor) -> None:
    conversation, params = _prompted(executor), SamplingParams(temperature=100.0)
    assert len({conversation.sample(params).id for _ in range(40)}) > 1


@pytest.mark.parametrize("how", ["rewind", "modify"])
def test_penalties_forget_what_a_conversation_has_lost(executor: Executor, how: str) -> None:
    conversation = _prompted(executor, list(range(70, 80)))
    written = _stepped(executor, conversation, 12)
    if how == "rewind":
        conversation.rewind(6)
        conversation.prompt([])
    else:
        conversation.modify(lambda tokens: tokens[:-6])
    executor.infer()
    assert _stepped(executor, conversation, 6) == written[6:]


def test_penalties_of_an_earlier_place_count_no_later_tokens(executor: Executor) -> None:
    tokens = list(range(79, 84))
    conversation, shorter = executor.create(), executor.create()
    conversation.prompt(tokens, all_logits=True)
    shorter.prompt(tokens[:2])
    executor.infer()
    last = conversation.sample(_REPEATING)
    assert conversation.sample(_REPEATING, offset=3).id == shorter.sample(_REPEATING).id
    assert conversation.sample(_REPEATING) == last


def test_a_log_probability_is_that_of_the_logits_whenever_it_is_read(executor: Executor) -> None:
    conversation = _prompted(executor)
    at_once, late = list[float](), list[Token]()
    for token in conversation.generate(12, _REPEATING):
        late.append(token)
        at_once.append(token_logprobs(conversation.logits(), token.id, 0).chosen)
    assert [token.logprob for token in late] == pytest.approx(at_once)
    for same in (pickle.loads(pickle.dumps(late[-1])), copy.deepcopy(late[-1])):
        assert (same, same.logprob) == (late[-1], late[-1].logprob)


def test_no_logits_are_kept_for_tokens_that_are_gone_or_old() -> None:
    kept = KeptLogprobs(Sampler(ToyBackend(cells=1, max_sequences=1).candidate_filter, 1))
    rows = [np.full((1, 8), float(place), np.float32) for place in range(4)]
    seen = [weakref.ref(row) for row in rows]
    tokens = []
    for place in range(4):
        tokens.append(kept.of(rows.pop(0), place))
        if place == 1:
            tokens.pop()
        kept.advance()
    assert [row() is None for row in seen] == [True, True, True, False]
    assert [float(token) for token in tokens] == pytest.approx([-np.log(8)] * 3)
    assert [row() for row in seen] == [None] * 4
