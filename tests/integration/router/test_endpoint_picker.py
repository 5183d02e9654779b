"""Two routers behind a picker that reads only what llm-d documents: `caravan_testing.picker`."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_network
from typing import Any

import pytest
from aiohttp import ClientSession

from caravan_dialects.api.limits import Limits
from caravan_router.http.app import Access
from caravan_testing.cluster import Cluster, ClusterConfig, StepLog, body, cluster, generate
from caravan_testing.picker import DROPPED_REASON, ENGINE_LABEL, Picker, Pod, router_pod_labels
from caravan_testing.waiting import eventually

TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
GATEWAY = {
    "x_llm_d_inference_fairness_id": "team-a",
    "x_llm_d_inference_objective": "batch",
    "x_llm_d_slo_ttft_ms": "200",
}


@dataclass
class Pool:
    """``logs``: the steps of each router's shard."""

    picker: Picker
    routers: list[Cluster]
    logs: list[StepLog]
    session: ClientSession


@contextlib.asynccontextmanager
async def pool(limits: Limits | None = None, adapters: tuple[str, ...] = ()) -> AsyncIterator[Pool]:
    """Run two routers, each with a shard, and a picker in front of them whose headers they trust."""
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(ClientSession())
        logs = [StepLog(), StepLog()]
        routers = [
            await stack.enter_async_context(
                cluster(
                    ClusterConfig(
                        chat_template=TEMPLATE,
                        hook=log,
                        token_s=0.0002,
                        adapters=adapters,
                        limits=limits or Limits(),
                        access=Access(trusted_proxies=(ip_network("127.0.0.0/8"), ip_network("::1/128"))),
                    )
                )
            )
            for log in logs
        ]
        picker = Picker(session, [Pod(router.url, router_pod_labels()) for router in routers])
        for pod in picker.pods:
            await eventually(partial(picker.load, pod), "the cells are known", lambda load: load.blocks == 256)
        yield Pool(picker, routers, logs, session)


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 4, **fields}


def test_the_label_of_pods_names_an_engine_that_is_configured() -> None:
    assert router_pod_labels()[ENGINE_LABEL] == "caravan"


async def test_requests_go_to_the_router_that_is_idle() -> None:
    async with pool() as found:
        busy, idle = found.picker.pods  # of equals, the first is picked
        waiting = [
            asyncio.create_task(generate(found.session, busy.url, body(f"{number} waits", 3))) for number in range(12)
        ]
        async with found.logs[0].held():
            load = await eventually(
                lambda: found.picker.load(busy),
                "the metrics tell of all",
                lambda load: load.queued + load.running == 12,
            )
            assert load.queued >= 4, "at most eight run"
            for number in range(3):
                routed = await found.picker.send(chat(f"{number} of some requests, each of another prompt"))
                assert (routed.status, routed.pod) == (200, idle)
        await asyncio.gather(*waiting)


@pytest.mark.usefixtures("copies_cost_as_guessed")
async def test_a_prompt_goes_where_its_beginning_is_in_the_cache() -> None:
    async with pool() as found:
        texts = [f"{name} has a long story that begins in the desert, at a well. " * 3 for name in ("Aya", "Bob")]
        first = []
        for text in texts:
            first.append(await found.picker.send(chat(text)))
            # Of equals, the first one is taken.
            found.picker.pods = found.picker.pods[::-1]
        assert first[0].pod is not first[1].pod
        for text, before in zip(texts, first, strict=True):
            routed = await found.picker.send(chat(text + "And then?"))
            assert routed.pod is before.pod
            usage = routed.body["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] > 0.8 * usage["prompt_tokens"]


async def test_an_adapter_that_runs_attracts_its_requests() -> None:
    async with pool(adapters=("poet", "cook")) as found:
        loads = [await found.picker.load(pod) for pod in found.picker.pods]
        assert [(load.adapters, load.max_adapters) for load in loads] == [(frozenset(), 2)] * 2
        at_second = found.picker.pods[1]
        asked = chat("Some verses", model="poet")
        running = asyncio.create_task(found.session.post(f"{at_second.url}/v1/chat/completions", json=asked))
        async with found.logs[1].held():
            await eventually(
                lambda: found.picker.load(at_second), "it runs", lambda load: load.adapters == frozenset({"poet"})
            )
            routed = asyncio.create_task(found.picker.send(chat("Other verses", model="poet")))
            await eventually(lambda: len(found.routers[1].engine.scheduler.sequences) == 2, "it went there")
        assert (await routed).status == 200
        (await running).release()


async def test_a_request_waits_no_longer_than_its_gateway_says() -> None:
    async with pool() as found:
        busy, _ = found.picker.pods
        waiting = [
            asyncio.create_task(generate(found.session, busy.url, body(f"{number} waits", 3))) for number in range(12)
        ]
        async with found.logs[0].held():
            await eventually(
                lambda: found.picker.load(busy), "all are there", lambda load: load.queued + load.running == 12
            )
            async with found.session.post(
                f"{busy.url}/v1/chat/completions", json=chat("too late"), headers={"x-llm-d-inference-ttl": "50ms"}
            ) as response:
                assert (response.status, response.headers[DROPPED_REASON]) == (429, "queue_timeout")
        await asyncio.gather(*waiting)
        failed = 'tgi_request_failure{err="queue_timeout"}'
        assert await found.routers[0].metric(failed) == 1


async def test_a_router_is_told_for_whom_a_request_is_and_says_why_it_refuses_one() -> None:
    async with pool(Limits(max_concurrent_requests=1)) as found:
        asked = asyncio.create_task(found.picker.send(chat("a request of the team"), **GATEWAY))
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(found.logs[0].held())
            (sequence,) = found.routers[0].engine.scheduler.sequences.values()
            assert sequence.spec.session == "team-a"
            other = asyncio.create_task(generate(found.session, found.routers[1].url, body("the other is full too", 3)))
            await stack.enter_async_context(found.logs[1].held())
            refused = await found.picker.send(chat("one too many"))
            assert (refused.status, refused.dropped) == (429, "overloaded")
        assert (await asked).status == 200
        await other
