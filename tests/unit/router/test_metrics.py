import pytest
from prometheus_client.parser import text_string_to_metric_families

from caravan_proto.messages.results import StepOutcome
from caravan_router.engine.observer import Method, QueueUse, ShardUse
from caravan_router.metrics.exposition import Histogram
from caravan_router.metrics.recorder import Metrics
from caravan_router.metrics.table import METRICS
from caravan_scheduler.actions import Start
from caravan_scheduler.config import JoinReason
from caravan_scheduler.core.recomputed import Part, Reason, Recomputed
from caravan_scheduler.core.request_metrics import Failure
from caravan_scheduler.core.tokens import GeneratedToken
from caravan_scheduler.events import Stepped


async def lines(metrics: Metrics) -> list[str]:
    return (await metrics.render()).decode().splitlines()


def use(shard: str, used: int, sequences: int) -> ShardUse:
    return ShardUse(
        shard=shard,
        used_cells=used,
        cached_cells=0,
        total_cells=100,
        memory_bytes=0,
        disk_bytes=0,
        pinned_bytes=0,
        sequences=sequences,
    )


async def test_every_metric_of_the_table_is_exposed_under_its_exact_name() -> None:
    exposed = await lines(Metrics())
    for spec in METRICS:
        assert f"# TYPE {spec.name} {spec.kind.value}" in exposed


async def test_prometheus_can_parse_the_metrics() -> None:
    metrics = Metrics()
    metrics.of("m").shard_use(use('odd "name"\\\n', 1, 1))
    families = list(text_string_to_metric_families((await metrics.render()).decode()))
    [family] = [family for family in families if family.name == "caravan_kv_cells_used"]
    assert family.samples[0].labels == {"shard": 'odd "name"\\\n', "model": "m"}


async def test_a_step_is_counted_by_method_and_by_shard() -> None:
    metrics = Metrics()
    step = Stepped(
        shard="s",
        command_id=1,
        outcome=StepOutcome.OK,
        tokens=tuple((number, GeneratedToken(5, b"x", False, None, (), None)) for number in range(8)),
        seconds=0.022,
        forward_s=0.02,
        sample_s=0.001,
    )
    metrics.of("m").step(step, Method.DECODE, overhead_s=0.002)
    metrics.of("m").step_failed(Method.DECODE)
    metrics.of("m").joined(JoinReason.WAIT_EXCEEDED)
    exposed = await lines(metrics)
    assert 'tgi_batch_inference_count{method="decode",model="m"} 2' in exposed
    assert 'tgi_batch_inference_success{method="decode",model="m"} 1' in exposed
    assert 'tgi_batch_inference_failure{method="decode",model="m"} 1' in exposed
    assert 'tgi_batch_forward_duration_sum{method="decode",model="m"} 0.02' in exposed
    assert 'caravan_batch_size_bucket{shard="s",method="decode",model="m",le="8"} 1' in exposed
    assert 'caravan_batch_size_bucket{shard="s",method="decode",model="m",le="4"} 0' in exposed
    assert 'caravan_step_overhead_seconds_sum{shard="s",method="decode",model="m"} 0.002' in exposed
    assert 'tgi_batch_concat{reason="wait_exceeded",model="m"} 1' in exposed


async def test_cached_prompt_tokens_are_not_counted_as_speculated() -> None:
    metrics = Metrics()
    metrics.of("m").started(Start(1, "a", 10, cached_tokens=4))
    exposed = await lines(metrics)
    assert 'tgi_request_skipped_tokens_count{model="m"} 0' in exposed
    assert 'caravan_request_cached_tokens_count{model="m"} 1' in exposed
    assert 'caravan_request_cached_tokens_sum{model="m"} 4' in exposed


async def test_prompt_tokens_that_are_computed_are_counted_by_reason() -> None:
    metrics = Metrics()
    parts = (Part(Reason.EVICTED, 4, 5), Part(Reason.END, 9, 1))
    for _ in range(2):
        metrics.of("m").started(Start(1, "a", 10, cached_tokens=4, recomputed=Recomputed(parts)))
    exposed = await lines(metrics)
    assert 'caravan_prompt_computed_tokens_total{reason="evicted",model="m"} 10' in exposed
    assert 'caravan_prompt_computed_tokens_total{reason="end_of_prompt",model="m"} 2' in exposed


async def test_the_series_of_a_lost_shard_are_removed() -> None:
    metrics = Metrics()
    metrics.of("m").shard_use(use("a", 10, 2))
    metrics.of("m").shard_use(use("b", 5, 1))
    assert 'tgi_batch_current_size{model="m"} 3' in await lines(metrics)
    metrics.of("m").shard_gone("a")
    exposed = await lines(metrics)
    assert not [line for line in exposed if 'shard="a"' in line]
    assert {
        'caravan_shards_up{model="m"} 1',
        'tgi_batch_current_size{model="m"} 1',
        'tgi_batch_current_max_tokens{model="m"} 5',
    } <= set(exposed)


@pytest.mark.parametrize(("value", "bucket"), [(0.5, 0), (1.0, 0), (1.1, 1), (2.0, 1), (2.1, 2)])
def test_a_bucket_includes_its_upper_bound(value: float, bucket: int) -> None:
    histogram = Histogram([1.0, 2.0])
    histogram.observe(value)
    counts = [line.split()[-1] for line in histogram.samples("h", "")]
    assert counts[:3] == ["1" if index >= bucket else "0" for index in range(2)] + ["1"]


async def test_each_model_has_its_own_series() -> None:
    metrics = Metrics()
    for model, requests in (("a", 2), ("b", 5)):
        metrics.of(model).request_arrived(requests)
        metrics.of(model).queue(QueueUse(requests=requests, swapped=0, oldest_s=0.0))
        metrics.of(model).shard_use(use(f"shard of {model}", requests, 1))
    exposed = await lines(metrics)
    for model, requests in (("a", 2), ("b", 5)):
        assert f'tgi_request_count{{model="{model}"}} {requests}' in exposed
        assert f'tgi_queue_size{{model="{model}"}} {requests}' in exposed
        assert f'tgi_batch_current_max_tokens{{model="{model}"}} {requests}' in exposed
        assert f'caravan_kv_cells_used{{shard="shard of {model}",model="{model}"}} {requests}' in exposed
        assert f'caravan_inter_token_latency_seconds_count{{model="{model}"}} 0' in exposed


async def test_the_gauges_that_autoscalers_read() -> None:
    metrics = Metrics()
    model = metrics.of("m")
    model.queue(QueueUse(requests=3, swapped=1, oldest_s=12.5))
    model.shard_use(use("a", 90, 2))
    model.shard_use(use("b", 30, 1))
    assert {
        'tgi_queue_size{model="m"} 3',
        'caravan_queue_oldest_seconds{model="m"} 12.5',
        'caravan_kv_usage_ratio{model="m"} 0.6',
    } <= set(await lines(metrics))
    model.shard_gone("a")
    model.shard_gone("b")
    assert 'caravan_kv_usage_ratio{model="m"} 0' in await lines(metrics)


async def test_requests_that_cannot_be_tokenized_without_a_shard_count_as_waiting() -> None:
    metrics = Metrics()
    model = metrics.of("m")
    model.queue(QueueUse(requests=1, swapped=0, oldest_s=0.0))
    with model.validating(4), model.validating(2):
        assert 'tgi_queue_size{model="m"} 7' in await lines(metrics)
        assert 'caravan_queue_oldest_seconds{model="m"} 0' not in await lines(metrics)
        model.shard_use(use("a", 0, 0))
        assert 'tgi_queue_size{model="m"} 1' in await lines(metrics)
    model.shard_gone("a")
    assert 'tgi_queue_size{model="m"} 1' in await lines(metrics)


async def test_the_series_of_a_model_that_is_gone_are_removed_for_good() -> None:
    metrics = Metrics()
    gone = metrics.of("gone")
    gone.shard_use(use("a", 10, 2))
    gone.request_arrived()
    gone.model_gone()
    # A client that reads slowly ends its request later.
    gone.request_failed(Failure.DROPPED)
    gone.observe_inter_token(0.1)
    gone.queue(QueueUse(requests=0, swapped=0, oldest_s=0.0))
    assert not [line for line in await lines(metrics) if "gone" in line]
    metrics.of("gone").request_arrived()
    assert 'tgi_request_count{model="gone"} 1' in await lines(metrics)
