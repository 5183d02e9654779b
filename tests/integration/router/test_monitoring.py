"""What operators see: the timeline, and alerts, dashboard and autoscaler that use what /metrics shows."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import ClientResponse, ClientSession
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from caravan_scheduler.config import SchedulerConfig
from caravan_studio.recording.recorder import Recorder
from caravan_studio.timeline.messages import Frame, Gone, Hello, Message, State
from caravan_testing.cluster import Cluster, ClusterConfig, body, cluster, generate
from caravan_testing.monitoring_files import (
    TARGET_LABELS,
    dashboard,
    dashboard_expressions,
    keda_queries,
    names_in,
    rule_expressions,
)
from caravan_testing.vllm_dashboards import aiperf_queries, says_why_not, vllm_queries
from caravan_testing.waiting import eventually, in_time

PROMPT = "You answer in rhymes, whatever the question is about."


async def read(response: ClientResponse) -> Message:
    """Return the next message."""
    while True:
        line = await response.content.readline()
        assert line, "the stream has ended"
        if line.startswith(b"data: "):
            message: Message = msgspec.json.decode(line.removeprefix(b"data: "), type=Message)
            return message


async def read_until(response: ClientResponse, found: Any) -> list[Message]:
    """Return the messages up to the first for which ``found`` is true."""
    messages: list[Message] = []
    async with in_time("the timeline tells what is looked for"):
        while not messages or not found(messages[-1]):
            messages.append(await read(response))
    return messages


async def ask(session: ClientSession, running: Cluster, prompt: str) -> int:
    """Generate, and return the number of tokens."""
    asked: dict[str, object] = {"inputs": prompt, "parameters": {"max_new_tokens": 20, "details": True}}
    answer: Any = await generate(session, running.url, asked)
    count: int = answer["details"]["generated_tokens"]
    return count


def followers(running: Cluster) -> int:
    return len(running.engine.followers)


async def test_steps_of_all_shards_are_told_while_somebody_watches_and_nothing_is_kept_afterwards() -> None:
    async with cluster(ClusterConfig(shards=2, step_s=0.001)) as running, ClientSession() as session:
        async with session.get(f"{running.url}/admin/timeline") as response:
            assert response.content_type == "text/event-stream"
            assert isinstance(await read(response), Hello)
            await eventually(lambda: followers(running) == 1, "the scheduler is followed")
            sampled = sum(await asyncio.gather(*(ask(session, running, f"{n} {PROMPT}") for n in range(4))))
            messages = await read_until(
                response,
                lambda one: (
                    isinstance(one, State) and one.figures.requests == 4 and not any(s.running for s in one.shards)
                ),
            )
        frames = [one for one in messages if isinstance(one, Frame)]
        blocks = [block for frame in frames for block in frame.blocks]
        assert {block.shard for block in blocks} == set(running.addresses)
        assert sum(block.tokens for block in blocks) == sampled
        [ends, starts] = [[m.request for f in frames for m in f.marks if m.what == what] for what in ("end", "start")]
        assert sorted(ends) == sorted(starts)
        assert len(ends) == 4
        chunks = [chunk for block in blocks for chunk in block.chunks]
        assert sum(chunk.last for chunk in chunks) == 4
        await eventually(lambda: followers(running) == 0, "nobody follows the scheduler")


async def test_two_viewers_see_the_same_and_a_dropped_one_disturbs_nobody() -> None:
    async with cluster() as running, ClientSession() as session:
        url = f"{running.url}/admin/timeline"
        async with session.get(url) as stays:
            async with session.get(url) as leaves:
                await read_until(leaves, lambda one: isinstance(one, State))
            assert followers(running) == 1
            await generate(session, running.url, body(PROMPT, 5))
            messages = await read_until(stays, lambda one: isinstance(one, Frame))
            frame = messages[-1]
            assert isinstance(frame, Frame)
            assert any(block.kind == "prefill" for block in frame.blocks)


async def test_bugs_of_the_timeline_and_of_a_recording_do_not_end_what_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bug(*_: object) -> None:
        raise KeyError("bug")

    async with cluster(ClusterConfig(step_s=0.001)) as running, ClientSession() as session:
        batcher = running.engine
        recorder = Recorder(tmp_path / "recording")
        batcher.followers.append(recorder.follow("toy", batcher.scheduler, SchedulerConfig()))
        async with session.get(f"{running.url}/admin/timeline") as response:
            await eventually(lambda: followers(running) == 2, "the scheduler is followed")
            monkeypatch.setattr("caravan_studio.timeline.lanes.Lanes.note", bug)
            assert await ask(session, running, PROMPT) == 20
            assert followers(running) == 0
            monkeypatch.setattr("caravan_studio.timeline.model_timeline.ModelTimeline.messages", bug)
            await read_until(response, lambda one: isinstance(one, Gone))
            assert await ask(session, running, PROMPT) == 20
        recorder.close()


async def labels_by_name() -> dict[str, set[str]]:
    """Return the labels of the samples of each name."""
    async with cluster(ClusterConfig(shards=2, vllm_metrics=True)) as running, ClientSession() as session:
        await asyncio.gather(*(generate(session, running.url, body(f"prompt {number}", 20)) for number in range(12)))
        await running.wait_until_at_rest()

        async def metrics() -> str:
            async with session.get(f"{running.url}/metrics") as reply:
                return await reply.text()

        page = await eventually(metrics, "the use of cells is measured", lambda text: "caravan_kv_cells_used{" in text)
    labels: dict[str, set[str]] = {}
    for name, series in re.findall(r"^([\w:]+)(?:{(.*)})? \S+$", page, re.MULTILINE):
        labels.setdefault(name, set()).update(re.findall(r'(\w+)="', series))
    return labels


async def test_every_metric_and_label_of_rules_dashboards_autoscaler_and_aiperf_exists() -> None:
    shown = await labels_by_name()
    of_vllm = vllm_queries("toy") | aiperf_queries("toy")
    expressions = {
        **rule_expressions(),
        **dashboard_expressions(),
        **keda_queries('model="toy"'),
        **{where: query for where, query in of_vllm.items() if not says_why_not(query)},
    }
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
