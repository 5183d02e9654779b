"""Autoscaled pools of one model share its load, and keep their shards when an autoscaler takes over."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy.api_server import api_server
from deploy.chart import CHART
from deploy.tools import run_tool

SERIES = '{namespace="caravan",model="m.gguf"}'
# Pools by priority, and then by name. `fixed` has no autoscaler.
POOLS = """
models:
  m:
    file: m.gguf
    source: {claim: {name: models}}
    pools:
      b: {autoscaling: {type: keda, minReplicas: 1, maxReplicas: 4, requestsPerShard: 6}}
      a: {autoscaling: {type: hpa, minReplicas: 1, maxReplicas: 3, requestsPerShard: 6}}
      first: {autoscaling: {type: keda, minReplicas: 0, maxReplicas: 2, requestsPerShard: 6, priority: 10}}
      fixed: {replicas: 2, autoscaling: {requestsPerShard: 6}}
monitoring: {prometheusUrl: "http://prometheus:9090"}
"""
LEAST = {"b": 1, "a": 1, "first": 0, "fixed": 2}
MOST = {"b": 4, "a": 3, "first": 2, "fixed": 2}


@dataclass
class Wanted:
    """What an autoscaler asks for a pool, and how many of it fit a shard."""

    query: str
    threshold: float


def wanted_of(objects: list[dict[str, Any]], trigger: str = "requests") -> dict[str, Wanted]:
    """Return what each pool's autoscaler asks, by the pool's name."""
    found = {}
    recorded = {
        document["metadata"]["name"]: document["spec"]["groups"][0]["rules"][0]
        for document in objects
        if document["kind"] == "PrometheusRule"
    }
    for document in objects:
        pool = document["metadata"]["labels"].get("caravan/pool", "")
        if document["kind"] == "ScaledObject":
            (metadata,) = (part["metadata"] for part in document["spec"]["triggers"] if part["name"] == trigger)
            found[pool] = Wanted(metadata["query"], float(metadata["threshold"]))
        elif document["kind"] == "HorizontalPodAutoscaler" and trigger != "kv-use":
            (metric,) = (part["external"] for part in document["spec"]["metrics"])
            rule = recorded[document["metadata"]["name"]]
            assert metric["metric"]["name"] == rule["record"]
            assert metric["metric"]["selector"]["matchLabels"].items() <= rule["labels"].items()
            found[pool] = Wanted(rule["expr"], float(metric["target"]["averageValue"]))
    return found


def objects_of(values: str, folder: Path) -> list[dict[str, Any]]:
    path = folder / "values.yaml"
    path.write_text(values)
    text = run_tool("helm", "template", "caravan", CHART, "--namespace", "caravan", "--skip-tests", "--values", path)
    return [document for document in yaml.safe_load_all(text) if document]


def play(expressions: dict[str, list[float | None]], series: dict[str, str], folder: Path) -> None:
    """Let Prometheus' own tool evaluate each expression after 0, 1, 2... minutes; fails if the numbers are others.

    ``series`` are in its notation: ``0+1x9`` counts the minutes. None is no answer.
    """
    tests = [
        {
            "expr": expression,
            "eval_time": f"{minute}m",
            "exp_samples": [] if number is None else [{"labels": "{}", "value": number}],
        }
        for expression, numbers in expressions.items()
        for minute, number in enumerate(numbers)
    ]
    inputs = [{"series": name, "values": values} for name, values in series.items()]
    path = folder / "test.yaml"
    path.write_text(json.dumps({"tests": [{"interval": "1m", "input_series": inputs, "promql_expr_test": tests}]}))
    run_tool("promtool", "test", "rules", path)


def test_pools_of_one_model_scale_to_its_load_in_sum(tmp_path: Path) -> None:
    wanted = wanted_of(objects_of(POOLS, tmp_path))
    assert set(wanted) == {"a", "b", "first"}
    shards = {pool: f"ceil(({found.query}) / {found.threshold})" for pool, found in wanted.items()}
    loads = range(80)
    needed = [min(max(math.ceil(load / 6), sum(LEAST.values())), sum(MOST.values())) for load in loads]
    # What the least shards do not carry fills one pool after another.
    more = [number - sum(LEAST.values()) for number in needed]
    play(
        {
            f"{' + '.join(shards.values())} + {LEAST['fixed']}": list(needed),
            shards["first"]: [min(number, 2) for number in more],
            shards["a"]: [1 + min(max(number - 2, 0), 2) for number in more],
            shards["b"]: [1 + min(max(number - 4, 0), 3) for number in more],
        },
        {f"tgi_queue_size{SERIES}": "0+1x80", f"tgi_batch_current_size{SERIES}": "0x80"},
        tmp_path,
    )


def test_pools_of_one_model_share_its_cells(tmp_path: Path) -> None:
    (found,) = (found for pool, found in wanted_of(objects_of(POOLS, tmp_path), "kv-use").items() if pool == "first")
    # Four shards are the least. A shard has 100 cells, and should use 80.
    cells = {f"caravan_kv_cells{SERIES}": "100x20", f"caravan_kv_cells_used{SERIES}": "0+40x20"}
    needed = [max(0, math.ceil(40 * minute / 80) - 4) for minute in range(12)]
    play({f"ceil(({found.query}) / {found.threshold})": [min(2, number) for number in needed]}, cells, tmp_path)


def test_pools_of_one_model_share_the_shards_that_the_router_wants(tmp_path: Path) -> None:
    wanted = wanted_of(
        objects_of(POOLS.replace(", requestsPerShard: 6", "").replace("requestsPerShard: 6", ""), tmp_path), "wanted"
    )
    numbers = range(9)
    more = [max(0, number - sum(LEAST.values())) for number in numbers]
    play(
        {
            f"({found.query}) / {found.threshold}": [min(max(LEAST[pool], number), MOST[pool]) for number in shares]
            for pool, found in wanted.items()
            for shares in [
                {
                    "first": more,
                    "a": [1 + max(0, number - 2) for number in more],
                    "b": [1 + max(0, number - 4) for number in more],
                }[pool]
            ]
        },
        {f"caravan_wanted_shards{SERIES}": "0+1x9"},
        tmp_path,
    )


def test_a_pool_alone_asks_for_all_and_gets_no_answer_without_series(tmp_path: Path) -> None:
    (found,) = wanted_of(
        objects_of(POOLS.replace("b: ", "#").replace("a: {auto", "#").replace("fixed: ", "#"), tmp_path)
    ).values()
    play(
        {found.query: [4, 5, 6]},
        {f"tgi_queue_size{SERIES}": "0+1x3", f"tgi_batch_current_size{SERIES}": "4x3"},
        tmp_path,
    )
    play({found.query: [None, None]}, {'tgi_queue_size{namespace="caravan",model="n"}': "1x3"}, tmp_path)


def test_no_answer_is_an_error_and_prometheus_may_want_a_password(tmp_path: Path) -> None:
    fallback = POOLS.replace("maxReplicas: 4", "maxReplicas: 4, fallbackReplicas: 3")
    secured = f"""{fallback.rstrip()[:-1]}, prometheusAuth: {{
        modes: "bearer,custom", authenticationRef: {{name: thanos, kind: ClusterTriggerAuthentication}},
        customHeaders: X-Scope-OrgID=ml}}}}"""
    scaled = {
        document["metadata"]["labels"]["caravan/pool"]: document["spec"]
        for document in objects_of(secured, tmp_path)
        if document["kind"] == "ScaledObject"
    }
    assert scaled["b"]["fallback"] == {"failureThreshold": 3, "replicas": 3}
    # Without it, KEDA leaves the shards as they are.
    assert "fallback" not in scaled["first"]
    for trigger in scaled["first"]["triggers"]:
        assert trigger["metadata"]["ignoreNullValues"] == "false"
        assert trigger["metadata"]["authModes"] == "bearer,custom"
        assert trigger["metadata"]["customHeaders"] == "X-Scope-OrgID=ml"
        assert trigger["authenticationRef"] == {"name": "thanos", "kind": "ClusterTriggerAuthentication"}


def replicas_of(values: Path, *flags: str) -> dict[str, int | None]:
    """Return the replicas of each StatefulSet that helm would apply; None if it names none."""
    command = ("template", "caravan", CHART, "--namespace", "caravan", "--skip-tests", "--values", values)
    objects = yaml.safe_load_all(run_tool("helm", *command, *flags))
    return {
        found["metadata"]["name"]: found["spec"].get("replicas")
        for found in objects
        if found and found["kind"] == "StatefulSet"
    }


@pytest.mark.parametrize("running", [3, 0])
def test_a_pool_keeps_its_shards_when_an_autoscaler_takes_over(running: int, tmp_path: Path) -> None:
    objects, values = objects_of(POOLS, tmp_path), tmp_path / "values.yaml"
    with api_server(objects, {"caravan-m-a": running, "caravan-m-fixed": 5}) as url:
        found = replicas_of(values, "--dry-run=server", "--disable-openapi-validation", "--kube-apiserver", url)
    # The others are new, and begin with one shard. Without an autoscaler, the values say how many there are.
    assert found == {"caravan-m-a": running, "caravan-m-b": None, "caravan-m-first": None, "caravan-m-fixed": 2}


def test_without_a_cluster_the_number_is_left_to_the_autoscaler(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(POOLS)
    assert replicas_of(values)["caravan-m-a"] is None
