"""Bugs of the router: a request may fail by one, all else goes on; a router whose engine fails ends at once."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import ClientError, ClientSession

from caravan_router.app import run_router
from caravan_router.config import RouterConfig
from caravan_router.engine import command_runner, reply_codec
from caravan_router.engine.batcher import Batcher
from caravan_router.engine.fleet import Fleet
from caravan_router.engine.link_pool import LinkPool
from caravan_router.metrics.recorder import ModelMetrics
from caravan_scheduler.actions import Start
from caravan_scheduler.planning.placement import choose
from caravan_scheduler.planning.planner import Planner
from caravan_scheduler.planning.step_plan import StepPlan
from caravan_testing.cluster import Cluster, ClusterConfig, body, cluster, expected_text, generate
from caravan_testing.waiting import eventually, in_time

_LONG = body("a long one", 300)
_BAD = "bad " * 5


def _once(function: Callable[..., Any], when: Callable[..., bool] = lambda *_: True) -> Callable[..., Any]:
    """Return a function that raises an exception the first time that ``when`` is true of its arguments."""
    left = [1]

    def call(*args: Any, **kwargs: Any) -> Any:
        if left and when(*args):
            left.clear()
            raise ZeroDivisionError("a bug")
        return function(*args, **kwargs)

    return call


async def _ask(session: ClientSession, running: Cluster, prompt: str, **fields: Any) -> tuple[int, str]:
    asked = {"model": "m", "prompt": prompt, "max_tokens": 5, "temperature": 0, **fields}
    async with session.post(f"{running.url}/v1/completions", json=asked) as response:
        return response.status, await response.text()


def _is_bad(_index: Any, _plans: Any, sequence: Any) -> bool:
    return len(sequence.spec.prompt) == len(_BAD) + 1


@pytest.mark.parametrize("stream", [False, True])
async def test_the_request_that_meets_a_bug_gets_an_internal_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    async with cluster(ClusterConfig(step_s=0.002)) as running, ClientSession() as session:
        long = asyncio.create_task(generate(session, running.url, _LONG))
        await eventually(lambda: running.engine.scheduler.sequences, "it runs")
        monkeypatch.setattr("caravan_scheduler.planning.admission.choose", _once(choose, _is_bad))
        with caplog.at_level(logging.ERROR):
            status, text = await _ask(session, running, _BAD, stream=stream)
        assert stream or status == 500
        assert "Internal server error" in text
        assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError]
        assert (await long)["generated_text"] == expected_text("a long one", 300)
        assert await running.metric('caravan_scheduler_faults_total{scope="request"}') == 1
        assert (await _ask(session, running, _BAD))[0] == 200


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Planner, "plan"),
        (StepPlan, "send"),
        (reply_codec, "_drafts"),
        (command_runner.CommandRunner, "_observe"),
        (Batcher, "tick"),
        (LinkPool, "_share"),
        (ModelMetrics, "started"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
async def test_requests_go_on_after_a_bug_of_nobody_s(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(ClusterConfig(step_s=0.002)) as running, ClientSession() as session:
        asked = [asyncio.create_task(generate(session, running.url, body(f"text {n}", 60))) for n in range(4)]
        await eventually(lambda: running.engine.scheduler.sequences, "they run")
        monkeypatch.setattr(owner, name, _once(getattr(owner, name)))
        asked.append(asyncio.create_task(generate(session, running.url, body("text 4", 60))))
        texts = [(await one)["generated_text"] for one in asked]
        assert texts == [expected_text(f"text {n}", 60) for n in range(5)]
        await running.wait_until_at_rest()


async def test_an_action_that_is_not_carried_out_ends_its_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(ClusterConfig(step_s=0.002)) as running, ClientSession() as session:
        long = asyncio.create_task(generate(session, running.url, _LONG))
        await eventually(lambda: running.engine.scheduler.sequences, "it runs")
        execute = _once(Batcher._execute, lambda _, action: isinstance(action, Start))
        monkeypatch.setattr(Batcher, "_execute", execute)
        assert (await _ask(session, running, "another"))[0] == 500
        assert (await long)["generated_text"] == expected_text("a long one", 300)
        await running.wait_until_at_rest()


async def test_a_router_whose_engine_fails_ends_and_closes_its_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = asyncio.Event()

    async def run(_fleet: Fleet) -> None:
        await broken.wait()
        raise RuntimeError("a bug")

    monkeypatch.setattr(Fleet, "run", run)
    config = RouterConfig(shard=("unix:/nowhere",), port=0, shard_grace_s=600.0, graceful_termination_timeout=600.0)
    urls = asyncio.Queue[str]()
    router = asyncio.create_task(run_router(config, asyncio.Event(), lambda _fleet, url: urls.put_nowait(url)))
    async with ClientSession() as session, in_time("the router ends with its engine"):
        url = await urls.get()
        waiting = asyncio.create_task(session.post(f"{url}/generate", json={"inputs": "a"}))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        broken.set()
        with pytest.raises(ClientError):
            await waiting
        with pytest.raises(RuntimeError, match="a bug"):
            await router
