"""Shards are replaced while routers learn late of the new ones: the pools wait for that, and no request fails."""

import contextlib
import http.client
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from deploy.rollout.cluster import Size, cluster, until_ready
from deploy.rollout.load import Load

from caravan_testing.waiting import DEADLINE_S


def health_of(router: str) -> int:
    """Return the status of a router's /health: 200 while it has a shard."""
    with contextlib.closing(http.client.HTTPConnection(router, 3000, timeout=DEADLINE_S)) as connection:
        connection.request("GET", "/health")
        return connection.getresponse().status


# Routers learn late of a new shard: without `minReadySeconds`, the last one that they know would end before that.
def test_a_router_always_has_a_shard_when_shards_are_replaced(tmp_path: Path) -> None:
    replicas = 2
    with cluster(tmp_path, Size(replicas, min_ready_s=5, lag_s=3.0)) as running:
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
@pytest.mark.timeout(900)
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
