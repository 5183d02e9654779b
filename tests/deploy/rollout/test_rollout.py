"""Upgrades of the chart on processes: pods are replaced under load, also by new weights, and no request fails."""

import contextlib
import http.client
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from deploy.rollout.cluster import TOY, Size, cluster, until_ready
from deploy.rollout.load import PROMPT, Load

from caravan_testing.waiting import DEADLINE_S

LLAMA = "{parallel: 2, ctx-size: 1024, threads: 1}"


# One shard has nowhere to send its sequences, and two routers cannot share it: requests wait meanwhile. The new one may
# join the new router first, which lets it go for the requests that the old router has left.
@pytest.mark.parametrize(("replicas", "flags"), [(3, TOY), (1, TOY), (3, LLAMA)], ids=["toy-3", "toy-1", "llama.cpp-3"])
def test_every_pod_is_replaced_under_load_without_a_failed_request(replicas: int, flags: str, tmp_path: Path) -> None:
    with cluster(tmp_path, Size(replicas, flags)) as running:
        shards = [running.start_pod("shard", f"caravan-demo-cpu-{number}") for number in range(replicas)]
        router = running.start_pod("router", "caravan-router-old")
        for pod in (*shards, router):
            until_ready(pod)

        def replace_router() -> None:
            # A Deployment with a surge starts the new pod first.
            until_ready(running.start_pod("router", "caravan-router-new"))
            router.terminate()

        load = Load(running.routers)
        load.start()
        try:
            load.until_each_is_answered()
            with ThreadPoolExecutor() as upgrade:
                parts = [
                    upgrade.submit(running.roll_out_shards, shards, running.until_it_runs),
                    upgrade.submit(replace_router),
                ]
            for part in parts:
                part.result()
            load.until_each_is_answered()
        finally:
            load.stop()
        assert load.failures == []
        if flags == TOY:  # of another model, a text that is computed again may differ at a near tie
            assert len({text for _, text in load.replies}) == 1
        assert {address for address, _ in load.replies} == {pod.place.address for pod in running.routers.pods}
        assert running.drained_sequences() > 0
        assert [pod.place.name for pod in running.pods if pod.restarts] == []


def respond(router: str, **body: Any) -> dict[str, Any]:
    """Return the answer of /v1/responses. Raises AssertionError if it is an error."""
    with contextlib.closing(http.client.HTTPConnection(router, 3000, timeout=DEADLINE_S)) as connection:
        request = {"input": PROMPT, "max_output_tokens": 8, **body}
        connection.request("POST", "/v1/responses", json.dumps(request), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        answer: dict[str, Any] = json.loads(reply.read())
    assert reply.status == 200, answer
    return answer


def test_a_response_is_continued_after_the_routers_pod_was_replaced(tmp_path: Path) -> None:
    with cluster(tmp_path, Size(1, state="claim")) as running:
        router = running.start_pod("router", "caravan-router-0")
        for pod in (running.start_pod("shard", "caravan-demo-cpu-0"), router):
            until_ready(pod)
        first = respond(router.place.address)
        # A StatefulSet ends the old pod first, and its claim goes on to the new one.
        router.terminate()
        again = running.start_pod("router", "caravan-router-0")
        until_ready(again)
        second = respond(again.place.address, previous_response_id=first["id"])
        assert second["previous_response_id"] == first["id"]


def fingerprints_of(router: str) -> set[str]:
    """Return the fingerprints of the files of a router's shards, as far as they are known."""
    with contextlib.closing(http.client.HTTPConnection(router, 3000, timeout=DEADLINE_S)) as connection:
        connection.request("GET", "/admin/shards")
        shards = json.loads(connection.getresponse().read())["shards"]
    return {shard["model_fingerprint"] for shard in shards} - {None}


@pytest.mark.parametrize("replicas", [3, 1])
def test_new_weights_take_over_an_alias_under_load_without_a_failed_request(replicas: int, tmp_path: Path) -> None:
    with cluster(tmp_path, Size(replicas)) as running:
        shards = [running.start_pod("shard", f"caravan-demo-cpu-{number}") for number in range(replicas)]
        router = running.start_pod("router", "caravan-router")
        for pod in (*shards, router):
            until_ready(pod)
        load = Load(running.routers)
        load.start()
        try:
            load.until_each_is_answered()
            old = fingerprints_of(router.place.address)
            running.upgrade("other-weights.gguf")
            running.roll_out_shards(shards, running.until_it_runs)
            load.until_each_is_answered()
        finally:
            load.stop()
        assert load.failures == []
        # The toy model computes the same with any file, so that a text that has moved on is as before.
        assert len({text for _, text in load.replies}) == 1
        assert len(old) == 1
        new = fingerprints_of(router.place.address)
        assert len(new - old) == 1
        assert "other-weights" in next(iter(new - old))
        assert running.drained_sequences() > 0
        assert [pod.place.name for pod in running.pods if pod.restarts] == []


def health_of(router: str) -> int:
    """Return the status of a router's /health: 200 while it has a shard."""
    with contextlib.closing(http.client.HTTPConnection(router, 3000, timeout=DEADLINE_S)) as connection:
        connection.request("GET", "/health")
        return connection.getresponse().status


# Routers learn late of a new shard: without `minReadySeconds`, the last one that they know would end before that.
def test_a_router_always_has_a_shard_when_shards_are_replaced(tmp_path: Path) -> None:
    replicas = 2
    with cluster(tmp_path, Size(replicas, min_ready_s=12, lag_s=3.0)) as running:
        shards = [running.start_pod("shard", f"caravan-demo-cpu-{number}") for number in range(replicas)]
        router = running.start_pod("router", "caravan-router")
        for pod in (*shards, router):
            until_ready(pod)
        load = Load(running.routers)
        load.start()
        try:
            load.until_each_is_answered()
            with ThreadPoolExecutor() as upgrade:
                rollout = upgrade.submit(running.roll_out_shards, shards, until_ready)
                statuses = set()
                while not rollout.done():
                    statuses.add(health_of(router.place.address))
                    time.sleep(0.05)
            rollout.result()
            load.until_each_is_answered()
        finally:
            load.stop()
        assert statuses == {200}
        assert load.failures == []


# What DNS may take: kubeadm's CoreDNS and its caches keep names for 30 s. The pools wait as long as by default.
@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2])
def test_a_rollout_goes_by_while_names_are_learnt_30_seconds_late(replicas: int, tmp_path: Path) -> None:
    with cluster(tmp_path, Size(replicas, min_ready_s=40, lag_s=30.0)) as running:
        shards = [running.start_pod("shard", f"caravan-demo-cpu-{number}") for number in range(replicas)]
        router = running.start_pod("router", "caravan-router")
        for pod in (*shards, router):
            until_ready(pod)
        load = Load(running.routers)
        load.start()
        try:
            load.until_each_is_answered()
            load.seconds.clear()  # those that waited until the router had learnt of the first shard
            running.roll_out_shards(shards, until_ready)
            load.until_each_is_answered()
        finally:
            load.stop()
        median, longest = statistics.median(load.seconds), max(load.seconds)
        print(
            f"{replicas} replicas: {len(load.seconds)} replies, {len(load.failures)} failures, median {median:.2f} s, "
            f"longest {longest:.2f} s, which is {longest / median:.1f} x the median"
        )
        assert load.failures == []
        # With one shard, all wait until the router knows the new one. Else this would be the sign of a lost router.
        assert longest < 120
