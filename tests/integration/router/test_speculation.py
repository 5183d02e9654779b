"""Speculation changes no output: in company, with scarce cells, lost shards and clients that leave. Toy model."""

import asyncio
import contextlib
import random
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import ClientSession

from caravan_dialects.api.limits import Limits
from caravan_proto.messages.constraint import Constraint, ConstraintKind
from caravan_proto.messages.limits import KvLayout
from caravan_proto.messages.results import DraftSource
from caravan_scheduler.core.generation import GenerationSpec, StoppingParams
from caravan_scheduler.core.tokens import GeneratedToken
from caravan_testing.always_drafts import draft_always
from caravan_testing.cluster import VOCABULARY, Cluster, ClusterConfig, cluster
from caravan_testing.shard_builders import toy_grammar
from caravan_testing.specs import read, run, spec, undisturbed
from caravan_testing.toy_oracle import expected_output
from caravan_testing.waiting import eventually

_REGEX = "([a-m]{2}-)+|[n-z]{1,3}[.]"


@pytest.fixture(autouse=True)
def drafting_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no host be so busy that drafts do not pay."""
    draft_always(monkeypatch)


def predicted(wanted: GenerationSpec, output: list[int], every: int) -> GenerationSpec:
    """Return ``wanted`` with its ``output`` as the prediction, of which every so many tokens one is wrong."""
    prediction = tuple(66 if every and place % every == 1 else token for place, token in enumerate(output))
    return replace(wanted, max_draft_tokens=8, prediction=prediction)


def demand(count: int, *, seeded: bool) -> list[tuple[GenerationSpec, list[int]]]:
    """Return requests of all kinds with predictions that are right, wrong, or partly wrong, and their outputs."""
    chance = random.Random(7)
    wanted = []
    for number in range(count):
        prompt = [chance.randrange(32, 127) for _ in range(chance.randrange(1, 60))]
        one = spec(prompt, chance.randrange(4, 50), seed=number if seeded else None, priority=chance.randrange(2))
        if number % 3 == 1:
            history: dict[str, Any] = {"repetition_penalty": 1.25, "frequency_penalty": 0.5, "dry_multiplier": 0.75}
            one = replace(one, sampling=replace(one.sampling, **history))
        if number % 4 == 1:
            stopping = replace(one.stopping, stop_token_ids=frozenset({101, 110}), min_tokens=3)
            one = replace(one, stopping=stopping)
        output = undisturbed(one)
        if number % 5 == 1:
            constraint = Constraint(ConstraintKind.REGEX, _REGEX)
            stopping = replace(one.stopping, ignore_eos=False, stop_token_ids=frozenset(), min_tokens=0)
            one = replace(one, constraint=constraint, stopping=stopping, sampling=spec([1], 1, seed=number).sampling)
            output = expected_output(
                prompt, one.stopping.max_new_tokens, sampling=_parameters(one), grammar=toy_grammar(_REGEX)
            )
        wanted.append((predicted(one, output, (0, 1, 2, 3, 7)[number % 5]), output))
    return wanted


def _parameters(wanted: GenerationSpec) -> Any:
    from caravan_proto.messages.sampling import SamplingParams

    return SamplingParams(temperature=wanted.sampling.temperature, seed=wanted.sampling.seed)


async def accepted(running: Cluster, source: str) -> float:
    return await running.metric(f'caravan_spec_decode_num_accepted_tokens_total{{source="{source}"}}')


async def tokens_of(running: Cluster, wanted: GenerationSpec) -> list[GeneratedToken]:
    with contextlib.closing(running.engine.submit(wanted)) as stream:
        return [token async for tokens in stream for token in tokens]


async def check(running: Cluster, wanted: list[tuple[GenerationSpec, list[int]]]) -> None:
    got = await asyncio.gather(*(run(running.engine, one) for one, _ in wanted))
    assert got == [output for _, output in wanted]
    await running.wait_until_at_rest()
    assert await accepted(running, "prediction") > 0


@pytest.mark.parametrize(
    ("layout", "seeded"),
    [
        (KvLayout.SPLIT, True),
        pytest.param(KvLayout.SPLIT, False, marks=pytest.mark.slow),
        pytest.param(KvLayout.UNIFIED, True, marks=pytest.mark.slow),
        pytest.param(KvLayout.UNIFIED, False, marks=pytest.mark.slow),
    ],
)
async def test_two_hundred_requests_have_the_output_that_they_have_without(layout: KvLayout, *, seeded: bool) -> None:
    async with cluster(ClusterConfig(layout=layout, cells=2048, step_s=0.002)) as running:
        await check(running, demand(200, seeded=seeded))


@pytest.mark.parametrize("cells", [300, 4096], ids=["scarce", "ample"])
async def test_repeated_requests_without_predictions(cells: int) -> None:
    async with cluster(ClusterConfig(cells=cells, step_s=0.002, token_s=0.0002)) as running:
        wanted = [(replace(one, prediction=()), output) for one, output in demand(40, seeded=True)]
        for _ in range(2):
            got = await asyncio.gather(*(run(running.engine, one) for one, _ in wanted))
            assert got == [output for _, output in wanted]
        assert await accepted(running, "pool") > 0
        await running.wait_until_at_rest()


async def test_text_that_a_constraint_forces() -> None:
    regex = "[a-f](ghijklmnopqrstuv){2}[.]"
    async with cluster(ClusterConfig(step_s=0.002)) as running:
        for seed in range(4):
            wanted = replace(
                spec([50, 60 + seed], 60, seed=seed),
                constraint=Constraint(ConstraintKind.REGEX, regex),
                stopping=StoppingParams(max_new_tokens=60),
                max_draft_tokens=8,
            )
            output = expected_output([50, 60 + seed], 60, sampling=_parameters(wanted), grammar=toy_grammar(regex))
            assert await run(running.engine, wanted) == output
        assert await accepted(running, "constraint") > 0


async def test_log_probabilities_are_those_without_drafts() -> None:
    async with cluster(ClusterConfig(step_s=0.002)) as running:
        wanted = [
            replace(one, sampling=replace(one.sampling, logprobs=True, top_n_tokens=number % 3))
            for number, (one, _) in enumerate(demand(40, seeded=True))
        ]
        plain = [replace(one, max_draft_tokens=0, prediction=()) for one in wanted]
        expected = await asyncio.gather(*(tokens_of(running, one) for one in plain))
        assert await asyncio.gather(*(tokens_of(running, one) for one in wanted)) == expected
        assert all(token.logprob is not None for tokens in expected for token in tokens)
        assert await accepted(running, "prediction") > 0


async def test_scarce_cells() -> None:
    async with cluster(ClusterConfig(cells=300, max_sequences=16, step_s=0.002, token_s=0.0002)) as running:
        await check(running, demand(80, seeded=True))


async def test_a_lost_shard_while_repeated_requests_draft_from_ended_outputs() -> None:
    async with cluster(ClusterConfig(shards=2, step_s=0.002)) as running:
        wanted = [(replace(one, prediction=()), output) for one, output in demand(30, seeded=True)]
        await asyncio.gather(*(run(running.engine, one) for one, _ in wanted))
        streams = [running.engine.submit(one) for one, _ in wanted]
        reading = [asyncio.create_task(read(stream)) for stream in streams]
        await eventually(lambda: sum(task.done() for task in reading) >= 3, "some have ended")
        await running.stop_shard(running.addresses[0])
        assert await asyncio.gather(*reading) == [output for _, output in wanted]
        assert await accepted(running, "pool") > 0


async def test_where_memory_cannot_be_cut_back_drafts_are_wanted_and_there_are_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    link = replace(ClusterConfig().link, wants_drafts=True)
    async with cluster(ClusterConfig(whole_only=True, link=link)) as running:
        wanted = spec([1, 2, 3], 20)
        output = undisturbed(wanted)
        stream = running.engine.submit(predicted(wanted, output, 0))
        assert await read(stream) == output
        assert not stream.drafts
        report = running.report(running.addresses[0])
        assert report is not None
        assert report.room is not None
        assert report.room.draft_tokens == 0
        assert report.numerics is not None
        assert report.numerics.same_in_chunks
    (warning,) = [record for record in caplog.records if "draft" in record.message]
    assert warning.message.endswith("the memory of its sequences cannot be cut back")


async def test_a_repeated_prompt_drafts_from_outputs_of_its_own_key_and_salt_only() -> None:
    async with cluster(ClusterConfig(step_s=0.005)) as running:
        prompt = [32 + place * 7 % 90 for place in range(30)]

        async def sources(namespace: str) -> set[DraftSource]:
            wanted = replace(spec(prompt, 40, seed=3, namespace=namespace), max_draft_tokens=8)
            stream = running.engine.submit(wanted)
            assert await read(stream) == undisturbed(wanted)
            return {count.source for count in stream.drafts if count.accepted}

        for namespace in ("alice\0", "bob\0", "alice\0salt"):
            assert DraftSource.POOL not in await sources(namespace)
        for namespace in ("alice\0", "bob\0", "alice\0salt"):
            assert DraftSource.POOL in await sources(namespace)
        assert await running.metric('caravan_spec_decode_num_accepted_tokens_total{source="pool"}') > 50


async def test_a_chat_with_a_prediction_is_answered_in_fewer_steps() -> None:
    config = ClusterConfig(step_s=0.005, limits=Limits(max_draft_tokens=8))
    async with cluster(config) as running, ClientSession(running.url) as client:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, "ignore_eos": True}

        async def reply(**fields: Any) -> dict[str, Any]:
            async with client.post("/v1/chat/completions", json=body | {"temperature": 0} | fields) as response:
                answer: dict[str, Any] = await response.json()
                assert response.status == 200, answer
                return answer

        async def steps() -> float:
            return await running.metric('tgi_batch_inference_success{method="decode"}')

        plain = await reply(speculate=0)
        without = await steps()
        text = plain["choices"][0]["message"]["content"]
        assert len(VOCABULARY.tokenize(text, add_special=False, parse_special=False)) > 30
        quick = await reply(prediction={"type": "content", "content": text})
        assert quick["choices"] == plain["choices"]
        assert await steps() - without < 0.5 * without
        stop = text[len(text) // 2 :][:3]
        stopped = await reply(speculate=0, stop=stop)
        assert len(stopped["choices"][0]["message"]["content"]) < len(text)
        also = await reply(prediction={"type": "content", "content": text}, stop=stop)
        assert also["choices"] == stopped["choices"]
        assert also["usage"]["completion_tokens"] == stopped["usage"]["completion_tokens"]
        details = quick["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] > 20
        assert await running.metric("tgi_request_skipped_tokens_sum") >= details["accepted_prediction_tokens"]


@pytest.mark.parametrize("wrong_every", [0, 3])
async def test_a_draft_model_changes_no_output(wrong_every: int) -> None:
    config = ClusterConfig(cells=1024, shards=2, step_s=0.002, wrong_every=wrong_every)
    async with cluster(config) as running, ClientSession(running.url) as client:
        async with client.get("/info") as response:
            assert (await response.json())["draft_model"] == "toy-draft"
        wanted = [(replace(one, prediction=(), max_draft_tokens=8), output) for one, output in demand(40, seeded=True)]
        streams = [running.engine.submit(one) for one, _ in wanted]
        reading = [asyncio.create_task(read(stream)) for stream in streams]
        await eventually(lambda: sum(task.done() for task in reading) >= 5, "some have ended")
        await running.stop_shard(running.addresses[0])
        assert await asyncio.gather(*reading) == [output for _, output in wanted]
        await running.wait_until_at_rest()
        assert await accepted(running, "model") > 0
