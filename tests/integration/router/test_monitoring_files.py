"""Alerts, dashboard and autoscaler use what /metrics shows, after requests to two shards with the toy model."""

import asyncio
import json
import re
from typing import Any

import pytest
from aiohttp import ClientSession
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from caravan_testing.cluster import ClusterConfig, body, cluster, generate
from caravan_testing.monitoring_files import (
    TARGET_LABELS,
    dashboard,
    dashboard_expressions,
    keda_queries,
    names_in,
    rule_expressions,
)
from caravan_testing.waiting import eventually


async def labels_by_name() -> dict[str, set[str]]:
    """Return the labels of the samples of each name."""
    async with cluster(ClusterConfig(shards=2)) as running, ClientSession() as session:
        await asyncio.gather(*(generate(session, running.url, body(f"prompt {number}", 20)) for number in range(12)))
        await running.wait_until_at_rest()

        async def metrics() -> str:
            async with session.get(f"{running.url}/metrics") as reply:
                return await reply.text()

        page = await eventually(metrics, "the use of cells is measured", lambda text: "caravan_kv_cells_used{" in text)
    labels: dict[str, set[str]] = {}
    for name, series in re.findall(r"^(\w+)(?:{(.*)})? \S+$", page, re.MULTILINE):
        labels.setdefault(name, set()).update(re.findall(r'(\w+)="', series))
    return labels


async def test_every_metric_and_label_of_rules_dashboard_and_autoscaler_exists() -> None:
    shown = await labels_by_name()
    expressions = {**rule_expressions(), **dashboard_expressions(), **keda_queries('model="toy"')}
    unknown = [
        f"{where}: {name}{{{', '.join(sorted(labels - shown.get(name, set()) - TARGET_LABELS))}}}"
        for where, expression in expressions.items()
        for name, labels in names_in(expression)
        if name not in shown or labels - shown[name] - TARGET_LABELS
    ]
    assert not unknown


@pytest.mark.parametrize("expression", ["sum(rate(a[5m])", "sum by (model (a)", "rate(a)[5m"])
def test_an_expression_that_does_not_parse_is_found(expression: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        list(names_in(expression))


def test_labels_of_matchers_groups_and_matching_are_found() -> None:
    expression = 'sum by (b) (rate(x{a="1"}[5m])) / on (c) y'
    assert list(names_in(expression)) == [("x", {"a", "b", "c"}), ("y", {"c"})]


def test_the_dashboard_has_the_form_of_grafana() -> None:
    """Grafana's own types know every key and keep every value."""
    assert_kept(dashboard(), json.loads(json.dumps(Dashboard.from_json(dashboard()), cls=JSONEncoder)))


def assert_kept(value: Any, read: Any, where: str = "") -> None:
    if isinstance(value, dict):
        assert value.keys() <= read.keys(), where
        for key in value:
            assert_kept(value[key], read[key], f"{where}.{key}")
    elif isinstance(value, list):
        assert len(value) == len(read), where
        for index, item in enumerate(value):
            assert_kept(item, read[index], f"{where}[{index}]")
    else:
        assert value == read, where


def test_the_dashboard_is_laid_out_without_overlap_and_asks_the_chosen_source() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        area = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert place["x"] + place["w"] <= 24
        assert not taken & area, panel["title"]
        taken |= area
        if panel["type"] == "row":
            continue
        assert panel["description"].endswith("."), panel["title"]
        for source in (panel["datasource"], *(target["datasource"] for target in panel["targets"])):
            assert source == {"type": "prometheus", "uid": "${datasource}"}


def test_legends_name_labels_that_the_expression_keeps() -> None:
    expressions = dashboard_expressions()
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            labels = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            expression = expressions[f"{panel['title']} {target['refId']}"]
            kept = set(re.findall(r"\w+", " ".join(re.findall(r" by \(([^)]*)\)", expression))))
            assert labels <= (kept or {"shard", "instance"}), f"{panel['title']}: {labels} of {expression}"
