"""Alerts, checked and played by Prometheus' own tool."""

import contextlib
import json
import math
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from deploy.tools import ROOT, run_tool, tool_path, try_tool

from caravan_router.metrics.table import FORMER_NAMES
from caravan_router.metrics.vllm import VLLM_ALIASES
from caravan_testing.monitoring_files import RULES, dashboard_expressions, keda_queries
from caravan_testing.programs import kept_ports
from caravan_testing.serve_process import MODEL, Served, serve
from caravan_testing.vllm_dashboards import aiperf_queries, says_why_not, vllm_queries
from caravan_testing.waiting import DEADLINE_S, wait_until

# Names that break promtool's rules: TGI's, vLLM's, and those of the version before. Without adapters there is no
# series of `vllm:lora_requests_info`.
FROZEN = {
    *("tgi_request_count", "tgi_request_success", "tgi_request_failure", "tgi_batch_concat"),
    *("tgi_batch_inference_count", "tgi_batch_inference_success", "tgi_batch_inference_failure"),
    *({alias.name for alias in VLLM_ALIASES} - {"vllm:lora_requests_info"}),
    *FORMER_NAMES,
}
CONFIG = """
global: {{scrape_interval: 2s, evaluation_interval: 1s}}
rule_files: ["{rules}"]
scrape_configs:
  - job_name: caravan
    static_configs: [{{targets: ["{target}"], labels: {{namespace: test}}}}]
"""
JOB = "caravan"


def test_rules_are_well_formed() -> None:
    run_tool("promtool", "check", "rules", RULES)


def test_alerts_fire_when_they_should() -> None:
    run_tool("promtool", "test", "rules", ROOT / "tests/deploy/rules_test.yaml")


# Requests of each client, and requests that fail: the first under load, the last after it.
_LEAST_REQUESTS, FAILURES = 3, 2


def post(url: str, body: Mapping[str, object]) -> int:
    """POST a request and return its status."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=600) as reply:
            reply.read()
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code


def load(served: Served, seconds: float) -> None:
    """Send more requests at a time than the cells hold, some with a common prefix, one with drafts, one that fails."""
    until = time.monotonic() + seconds
    common = "Once upon a time there was a caravan that crossed the desert. " * 4

    def client(number: int) -> None:
        sent = 0
        # On a busy machine, too, some requests end after others were counted: else nothing would have a rate.
        while time.monotonic() < until or sent < _LEAST_REQUESTS:
            sent += 1
            body = {"inputs": f"{common if number % 2 else ''}Story {number}:", "parameters": {"max_new_tokens": 60}}
            assert post(f"{served.url}/generate", body) == 200

    predicted = {"type": "content", "content": "The capital of France is Paris. " * 4}
    messages = [{"role": "user", "content": f"Repeat this: {predicted['content']}"}]
    chat = {"messages": messages, "max_tokens": 40, "prediction": predicted}
    assert post(f"{served.url}/v1/chat/completions", chat) == 200
    clients = [threading.Thread(target=client, args=(number,)) for number in range(10)]
    for thread in clients:
        thread.start()
    for _ in range(FAILURES):
        assert post(f"{served.url}/generate", {"inputs": "x", "parameters": {"temperature": -1.0}}) == 422
        for thread in clients:
            thread.join()


def status_of(url: str) -> int:
    with urllib.request.urlopen(url) as reply:
        return int(reply.status)


@contextlib.contextmanager
def prometheus(folder: Path, target: str) -> Iterator[str]:
    """Run Prometheus with the chart's alerts in ``folder`` until the end of the block; yields its URL."""
    config = folder / "prometheus.yml"
    config.write_text(CONFIG.format(rules=RULES, target=target))
    with kept_ports(1) as (port,), _prometheus_on(f"127.0.0.1:{port}", config, folder) as url:
        yield url


@contextlib.contextmanager
def _prometheus_on(address: str, config: Path, folder: Path) -> Iterator[str]:
    command = [str(tool_path("prometheus")), f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:
        wait_until(
            lambda: status_of(f"http://{address}/-/ready"),
            "Prometheus is ready",
            lambda found: found == 200,
            ignoring=(OSError,),
            unless=lambda: process.poll() is not None and (folder / "log").read_text(),
        )
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(DEADLINE_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    """What is left of a run under load: the page of metrics, and a Prometheus, which had scraped it by ``ended_s``."""

    page: str
    prometheus: str
    ended_s: float

    def get(self, path: str, **query: str) -> Any:
        url = f"{self.prometheus}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=DEADLINE_S) as reply:
            return json.load(reply)["data"]

    def values(self, expression: str) -> list[float]:
        """Return the value of each series of the result at the end of the load."""
        result = self.get("query", query=expression, time=str(self.ended_s))["result"]
        return [float(series["value"][1]) for series in result]


def until_scraped(url: str) -> float:
    """Wait until Prometheus has seen the end of the load, and return when it had."""
    query = urllib.parse.urlencode({"query": "sum(tgi_request_failure)"})

    def look() -> Any:
        with urllib.request.urlopen(f"{url}/api/v1/query?{query}") as reply:
            return json.load(reply)["data"]["result"]

    def has_all(found: Any) -> bool:
        return bool(found) and float(found[0]["value"][1]) >= FAILURES

    return float(wait_until(look, "the failures are scraped", has_all)[0]["value"][0])


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRun]:
    folder = tmp_path_factory.mktemp("prometheus")
    with (
        serve(
            "--shards", "2", "-np", "4", "-c", "512", "-t", "1", "--vllm-metrics", "on", "--speculate", "4"
        ) as served,
        prometheus(folder, served.url.removeprefix("http://")) as running,
    ):
        load(served, 12.0)
        # A scrape that comes late on a busy machine is given up, and nothing has a value until the next one.
        ended_s = until_scraped(running)
        with urllib.request.urlopen(f"{served.url}/metrics", timeout=DEADLINE_S) as reply:
            page = reply.read().decode()
        yield LiveRun(page=page, prometheus=running, ended_s=ended_s)


def test_promtool_finds_only_names_that_must_stay(live: LiveRun) -> None:
    findings = try_tool("promtool", "check", "metrics", stdin=live.page).stderr
    assert {finding.split()[0] for finding in findings.splitlines()} == FROZEN, findings


def test_prometheus_scrapes_the_router_without_errors(live: LiveRun) -> None:

    def look() -> tuple[str, str]:
        (target,) = live.get("targets")["activeTargets"]
        return target["health"], target["lastError"]

    wait_until(look, "a scrape succeeds", lambda found: found == ("up", ""))
    # Each shard and each bucket counts; three times as many would be a leak of labels.
    (scraped,) = live.values("scrape_samples_scraped")
    assert scraped < 2000


def test_prometheus_evaluates_all_alerts(live: LiveRun) -> None:
    (group,) = live.get("rules")["groups"]
    assert {rule["name"]: (rule["health"], rule.get("lastError", "")) for rule in group["rules"]} == {
        rule["name"]: ("ok", "") for rule in group["rules"]
    }
    assert not [rule["name"] for rule in group["rules"] if rule["state"] == "firing"]


@pytest.mark.parametrize("name", dashboard_expressions())
def test_a_panel_of_the_dashboard_shows_numbers(live: LiveRun, name: str) -> None:
    values = live.values(dashboard_expressions(job=JOB, model=MODEL.name)[name])
    # The mean of a shard that did nothing meanwhile is no number.
    assert any(map(math.isfinite, values)), values


@pytest.mark.parametrize("name", [*vllm_queries(""), *aiperf_queries("")])
def test_what_is_asked_of_vllm_has_an_answer_or_a_reason_why_not(live: LiveRun, name: str) -> None:
    query = (vllm_queries(MODEL.name) | aiperf_queries(MODEL.name))[name]
    assert any(map(math.isfinite, live.values(query))) is not says_why_not(query)


def queries_of(model: str) -> dict[str, str]:
    """Return the query of each of KEDA's triggers for a model of this run."""
    return keda_queries(f'namespace="test",model="{model}"')


def test_keda_gets_one_number_for_each_query_and_sees_the_load(live: LiveRun) -> None:
    queries = queries_of(MODEL.name)
    for query in queries.values():
        (value,) = live.values(query)
        assert math.isfinite(value)
    (requests,) = live.values(f"max_over_time(({queries['requests']})[1m:1s])")
    assert requests >= 8
    # In shards' worth of cells, of which there are two.
    (cells,) = live.values(f"max_over_time(({queries['kvUse']})[1m:1s])")
    assert 0.5 < cells <= 2


def test_keda_gets_no_answer_for_a_model_that_no_router_reports(live: LiveRun) -> None:
    assert live.values(queries_of("another")["requests"]) == []
    assert live.values(queries_of("another")["kvUse"]) == [0.0]
