"""Names of metrics beside our own: OpenMetrics', those of the version before, and vLLM's."""

import time

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from caravan_proto.messages.results import FinishReason, StepOutcome
from caravan_router.engine.observer import Method, QueueUse, ShardUse
from caravan_router.metrics.exposition import TextFormat
from caravan_router.metrics.recorder import Metrics
from caravan_router.metrics.table import BUILD_INFO, FORMER_NAMES, HTTP_REQUESTS, METRICS, Kind
from caravan_router.metrics.vllm import VLLM_ABSENT, VLLM_ALIASES
from caravan_scheduler.actions import Preemption, Start
from caravan_scheduler.core.request_metrics import RequestTimings
from caravan_scheduler.core.tokens import GeneratedToken
from caravan_scheduler.events import Stepped

# What Prometheus asks for.
ACCEPT = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1"
OPENMETRICS = TextFormat.accepted(ACCEPT)


def used() -> Metrics:
    """Return metrics of a model that was used, with adapters, and of requests whose model is not known."""
    metrics = Metrics(vllm_names=True)
    for status in (200, 204, 404):
        metrics.http_request("/v1/files/{id}", "GET", status)
    metrics.of("").queue(QueueUse(requests=5, swapped=0, oldest_s=0.0))
    model = metrics.of("m")
    for shard, adapters in (("a", {"", "poet"}), ("b", {"cook"})):
        model.shard_use(
            ShardUse(
                shard=shard,
                used_cells=100,
                cached_cells=0,
                total_cells=1000,
                memory_bytes=0,
                disk_bytes=0,
                pinned_bytes=0,
                sequences=1,
                adapters=adapters,
            )
        )
    model.queue(QueueUse(requests=3, swapped=0, oldest_s=0.0, adapters={"", "poet", "sage"}, max_adapters=4))
    model.started(Start(1, "a", 12, cached_tokens=4))
    for how, times in ((Preemption.SWAP, 2), (Preemption.RECOMPUTE, 1)):
        for _ in range(times):
            model.preempted(how)
    token = GeneratedToken(5, b"x", False, None, (), None)
    step = Stepped(
        shard="a",
        command_id=1,
        outcome=StepOutcome.OK,
        tokens=tuple((number, token) for number in range(3)),
        seconds=0.02,
        forward_s=0.02,
        sample_s=0.0,
    )
    for _ in range(5):
        model.step(step, Method.DECODE, overhead_s=0.0)
    timings = RequestTimings(total_s=1.0, validation_s=0.1, queue_s=0.2, prefill_s=0.3, decode_s=0.4)
    for finish in (FinishReason.EOS_TOKEN, FinishReason.STOP_SEQUENCE, FinishReason.LENGTH):
        model.request_succeeded(timings, 5, finish)
    return metrics


def samples(text: str) -> list[str]:
    """Return the samples of the models, without those of the process."""
    return [line for line in text.splitlines() if line.startswith(("caravan_", "tgi_", "vllm:", "http_"))]


async def page(metrics: Metrics, form: TextFormat) -> str:
    return (await metrics.render(form)).decode()


async def test_openmetrics_has_the_same_samples_as_the_text_format_and_a_strict_reader_takes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.5)
    metrics = used()
    text, openmetrics = await page(metrics, TextFormat.accepted()), await page(metrics, OPENMETRICS)
    assert samples(text) == samples(openmetrics)
    assert openmetrics.endswith("# EOF\n")
    kinds = {family.name: family.type for family in parse_openmetrics(openmetrics)}  # type: ignore[no-untyped-call]
    assert kinds["caravan_request_preemptions"] == "counter"
    assert kinds["vllm:generation_tokens"] == kinds["caravan_http_requests"] == kinds["http_requests"] == "counter"
    assert kinds["tgi_request_count"] == "unknown", "TGI's counters have no `_total`"
    assert kinds["caravan_time_to_first_token_seconds"] == "histogram"
    assert list(parse_text(text))


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", "text/plain; version=0.0.4; charset=utf-8"),
        ("text/html,*/*;q=0.8", "text/plain; version=0.0.4; charset=utf-8"),
        (ACCEPT, "application/openmetrics-text; version=1.0.0; charset=utf-8"),
    ],
)
def test_the_client_chooses_the_format(accept: str, content_type: str) -> None:
    assert TextFormat.accepted(accept).content_type.startswith(content_type)


def test_our_own_names_follow_openmetrics() -> None:
    wrong = [
        spec.name
        for spec in (*METRICS, BUILD_INFO, HTTP_REQUESTS)
        if not spec.name.startswith("tgi_") and spec.name.endswith("_total") is not (spec.kind is Kind.COUNTER)
    ]
    assert not wrong
    names = {spec.name for spec in METRICS}
    assert not names & FORMER_NAMES.keys()
    assert not names & {f"{former}_total" for former in FORMER_NAMES}, "both have one name in OpenMetrics"


async def test_the_names_of_the_version_before_have_the_same_values() -> None:
    found = samples(await page(used(), TextFormat.accepted()))
    for former, name in FORMER_NAMES.items():
        ours = [line.replace(name, former) for line in found if line.startswith((f"{name}{{", f"{name} "))]
        assert ours == [line for line in found if line.startswith((f"{former}{{", f"{former} "))]
        assert ours
    assert 'caravan_preemptions{how="swap",model="m"} 2' in found


async def test_vllm_names_are_exposed_if_asked_for_and_for_known_models_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "vllm:" not in await page(Metrics(), TextFormat.accepted())
    monkeypatch.setattr(time, "time", lambda: 1000.5)
    found = [line for line in samples(await page(used(), TextFormat.accepted())) if line.startswith("vllm:")]
    assert not [line for line in found if 'model_name="m"' not in line]
    adapters = 'running_lora_adapters="cook,poet",waiting_lora_adapters="sage",max_lora="4"'
    assert {
        'vllm:num_requests_waiting{model_name="m"} 3',
        'vllm:num_requests_running{model_name="m"} 2',
        'vllm:kv_cache_usage_perc{model_name="m"} 0.1',
        'vllm:gpu_cache_usage_perc{model_name="m"} 0.1',
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="125",model_name="m"} 1',
        f'vllm:lora_requests_info{{{adapters},model_name="m"}} 1000.5',
        'vllm:prompt_tokens_total{model_name="m"} 12',
        'vllm:prefix_cache_queries_total{model_name="m"} 12',
        'vllm:prefix_cache_hits_total{model_name="m"} 4',
        'vllm:generation_tokens_total{model_name="m"} 15',
        'vllm:num_preemptions_total{model_name="m"} 3',
        'vllm:request_success_total{finished_reason="stop",model_name="m"} 2',
        'vllm:request_success_total{finished_reason="length",model_name="m"} 1',
        'vllm:request_prefill_time_seconds_sum{model_name="m"} 0.8999999999999999',
        'vllm:request_inference_time_seconds_count{model_name="m"} 3',
    } <= set(found)


async def test_http_requests_are_counted_by_status_and_under_vllms_name_by_its_group() -> None:
    ours = 'caravan_http_requests_total{handler="/v1/files/{id}",method="GET",status="204"} 1'
    of_vllm = 'http_requests_total{handler="/v1/files/{id}",method="GET",status="2xx"} 2'
    assert {ours, of_vllm} <= set(samples(await page(used(), TextFormat.accepted())))
    metrics = Metrics()
    metrics.http_request("/v1/files/{id}", "GET", 204)
    found = samples(await page(metrics, TextFormat.accepted()))
    assert ours in found
    assert not [line for line in found if line.startswith("http_")]


async def test_a_model_that_is_called_as_a_status_takes_no_counts_of_requests_along() -> None:
    metrics = used()
    metrics.of("200").model_gone()
    assert "caravan_http_requests_total" in "".join(samples(await page(metrics, TextFormat.accepted())))


async def test_a_model_has_one_series_about_its_adapters_and_none_without_them() -> None:
    metrics = used()
    await metrics.render()
    model = metrics.of("m")
    model.queue(QueueUse(requests=0, swapped=0, oldest_s=0.0, max_adapters=5))
    model.shard_gone("a")
    [line] = [line for line in samples(await page(metrics, TextFormat.accepted())) if "caravan_lora_requests" in line]
    assert 'running_lora_adapters="cook",waiting_lora_adapters="",max_lora="5",model="m"' in line
    model.queue(QueueUse(requests=0, swapped=0, oldest_s=0.0))
    model.shard_gone("b")
    assert not [
        line for line in samples(await page(metrics, TextFormat.accepted())) if "_info{" in line and "m" in line
    ]


def test_a_name_of_vllm_is_exposed_or_absent() -> None:
    names = [alias.name for alias in VLLM_ALIASES]
    assert len(set(names)) == len(names)
    assert not set(names) & VLLM_ABSENT.keys()
    assert {alias.of for alias in VLLM_ALIASES} <= {spec.name for spec in METRICS}
