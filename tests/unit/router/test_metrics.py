import pytest
from prometheus_client.parser import text_string_to_metric_families

from caravan_router.core.tokens import GeneratedToken
from caravan_router.engine.observer import Method, ShardUse
from caravan_router.metrics.instruments import Histogram
from caravan_router.metrics.recorder import Metrics
from caravan_router.metrics.table import METRICS
from caravan_router.scheduling.config import JoinReason
from caravan_router.scheduling.events import StepOutcome, Stepped


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
        sequences=sequences,
    )


async def test_every_metric_of_the_table_is_exposed_under_its_exact_name() -> None:
    exposed = await lines(Metrics())
    for spec in METRICS:
        assert f"# TYPE {spec.name} {spec.kind.value}" in exposed


async def test_prometheus_can_parse_the_metrics() -> None:
    metrics = Metrics()
    metrics.shard_use(use('odd "name"\\\n', 1, 1))
    families = list(text_string_to_metric_families((await metrics.render()).decode()))
    [family] = [family for family in families if family.name == "caravan_kv_cells_used"]
    assert family.samples[0].labels == {"shard": 'odd "name"\\\n'}


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
    metrics.step(step, Method.DECODE, overhead_s=0.002)
    metrics.step_failed(Method.DECODE)
    metrics.joined(JoinReason.WAIT_EXCEEDED)
    exposed = await lines(metrics)
    assert 'tgi_batch_inference_count{method="decode"} 2' in exposed
    assert 'tgi_batch_inference_success{method="decode"} 1' in exposed
    assert 'tgi_batch_inference_failure{method="decode"} 1' in exposed
    assert 'tgi_batch_forward_duration_sum{method="decode"} 0.02' in exposed
    assert 'caravan_batch_size_bucket{shard="s",method="decode",le="8"} 1' in exposed
    assert 'caravan_batch_size_bucket{shard="s",method="decode",le="4"} 0' in exposed
    assert 'caravan_step_overhead_seconds_sum{shard="s",method="decode"} 0.002' in exposed
    assert 'tgi_batch_concat{reason="wait_exceeded"} 1' in exposed


async def test_cached_prompt_tokens_are_not_counted_as_speculated() -> None:
    metrics = Metrics()
    metrics.started(10, cached_tokens=4)
    exposed = await lines(metrics)
    assert "tgi_request_skipped_tokens_count 0" in exposed
    assert "caravan_request_cached_tokens_count 1" in exposed
    assert "caravan_request_cached_tokens_sum 4" in exposed


async def test_the_series_of_a_lost_shard_are_removed() -> None:
    metrics = Metrics()
    metrics.shard_use(use("a", 10, 2))
    metrics.shard_use(use("b", 5, 1))
    assert "tgi_batch_current_size 3" in await lines(metrics)
    metrics.shard_gone("a")
    exposed = await lines(metrics)
    assert not [line for line in exposed if 'shard="a"' in line]
    assert {"caravan_shards_up 1", "tgi_batch_current_size 1", "tgi_batch_current_max_tokens 5"} <= set(exposed)


@pytest.mark.parametrize(("value", "bucket"), [(0.5, 0), (1.0, 0), (1.1, 1), (2.0, 1), (2.1, 2)])
def test_a_bucket_includes_its_upper_bound(value: float, bucket: int) -> None:
    histogram = Histogram([1.0, 2.0])
    histogram.observe(value)
    counts = [line.split()[-1] for line in histogram.samples("h", "")]
    assert counts[:3] == ["1" if index >= bucket else "0" for index in range(2)] + ["1"]
