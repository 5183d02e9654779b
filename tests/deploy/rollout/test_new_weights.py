"""Shards with other weights take over an alias under load, and no request fails."""

import contextlib
import http.client
import json
from pathlib import Path

import pytest
from deploy.rollout.cluster import Size, cluster, until_ready
from deploy.rollout.load import Load

from caravan_testing.waiting import DEADLINE_S


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
