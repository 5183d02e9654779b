"""Traces reach a collector over a real socket, from requests to shards with the toy model."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import replace

import pytest
from aiohttp import ClientSession
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from caravan_dialects.api.generation.serving import gateway_of
from caravan_router.tracing.settings import TraceSettings, tracing
from caravan_router.tracing.spans import OpenTelemetry
from caravan_scheduler.core.trace import ArrivedRequest, ServedRequest
from caravan_testing.cluster import Cluster, ClusterConfig, body, cluster, expected_text
from caravan_testing.otlp_receiver import ReceivedSpan, Receiver, grpc_receiver, http_receiver
from caravan_testing.waiting import DEADLINE_S, eventually

CONFIG = ClusterConfig(max_sequences=2, step_s=0.004, token_s=0.002, drain_timeout_s=DEADLINE_S)
TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
SPAN_KIND_SERVER = 2


@pytest.fixture(autouse=True)
def short_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")


@pytest.fixture(autouse=True)
def all_levels(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("caravan.access", "caravan_shard", "caravan_router", "caravan_dialects"):
        caplog.set_level(logging.DEBUG, name)


@asynccontextmanager
async def traced(
    endpoint: str, config: ClusterConfig = CONFIG, *, over_http: bool = False, service_name: str | None = None
) -> AsyncIterator[Cluster]:
    settings = TraceSettings(endpoint=endpoint, service_name=service_name, over_http=over_http)
    async with tracing(settings) as traces, cluster(replace(config, tracing=traces)) as running:
        yield running


async def post(running: Cluster, request_id: str, body: dict[str, object], **headers: str) -> str:
    """Generate and return the text; the status must be 200."""
    async with (
        ClientSession() as session,
        session.post(f"{running.url}/generate", json=body, headers={"X-Request-Id": request_id, **headers}) as response,
    ):
        answer = await response.json()
        assert response.status == 200, answer
        return str(answer["generated_text"])


def test_a_span_has_the_notes_of_a_gateway_and_the_session() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace = OpenTelemetry(provider).request(ArrivedRequest(method="POST", route="/", request_id="r", arrived_s=0.0))
    gateway = gateway_of(
        {"x-llm-d-inference-objective": "batch", "x-llm-d-slo-ttft-ms": "200", "x-llm-d-slo-tpot-ms": ""}
    )
    trace.serves(
        ServedRequest(asked="", model="m", operation="chat", streamed=True, session="s", gateway=gateway.notes)
    )
    trace.end(200)
    (span,) = exporter.get_finished_spans()
    own = {
        name: value for name, value in (span.attributes or {}).items() if name.startswith(("caravan.g", "caravan.s"))
    }
    assert own == {
        "caravan.session": "s",
        "caravan.gateway.objective": "batch",
        "caravan.gateway.slo_ttft_ms": "200",
    }


async def received(receiver: Receiver, request_id: str) -> ReceivedSpan:
    await eventually(lambda: receiver.span(request_id) is not None, "the span came")
    span = receiver.span(request_id)
    assert span is not None
    return span


def lines(caplog: pytest.LogCaptureFixture, trace_id: str, level: int = logging.INFO) -> list[str]:
    """Return the messages of the log about a trace, of the access log without its arguments."""
    found = [record for record in caplog.records if getattr(record, "trace_id", None) == trace_id]
    return [str(record.msg) for record in found if record.levelno >= level]


def prompt(letter: str) -> str:
    return letter * 100


@pytest.mark.parametrize(
    ("receiving", "over_http"), [(grpc_receiver, False), (http_receiver, True)], ids=["grpc", "http"]
)
async def test_a_request_has_one_span(
    receiving: Callable[[], AbstractContextManager[Receiver]], over_http: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with receiving() as receiver:
        async with traced(receiver.endpoint, over_http=over_http) as running:
            (shard,) = running.addresses
            began = time.monotonic()
            text = await post(running, "one", body("hello", 7) | {"session_id": "chat-1"})
            elapsed = time.monotonic() - began
            span = await received(receiver, "one")
        assert text == expected_text("hello", 7)
    assert (span.name, span.kind, span.parent_id) == ("POST /generate", SPAN_KIND_SERVER, "")
    assert not span.is_error
    assert 0.02 < span.seconds <= elapsed
    prompt_tokens = span.attributes.pop("gen_ai.usage.input_tokens")
    assert prompt_tokens >= len("hello")
    assert span.attributes == {
        "http.request.method": "POST",
        "http.route": "/generate",
        "http.response.status_code": 200,
        "caravan.request_id": "one",
        "caravan.session": "chat-1",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "caravan",
        "gen_ai.request.model": "toy",
        "gen_ai.response.model": "toy",
        "gen_ai.request.stream": False,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.output_tokens": 7,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "caravan.prompt_computed.new": prompt_tokens,
    }
    assert span.events == [
        ("queued", {"caravan.generation": 0}),
        ("started", {"caravan.generation": 0, "caravan.shard": shard, "caravan.cached_tokens": 0}),
        ("first_token", {"caravan.generation": 0}),
        ("finished", {"caravan.generation": 0, "caravan.finish_reason": "length", "caravan.output_tokens": 7}),
    ]
    assert span.resource["service.name"] == "caravan-router"
    assert lines(caplog, span.trace_id) == ["sequence started", "sequence ended", "%s %s %d %.3f s"]


@pytest.mark.usefixtures("copies_cost_as_guessed")
async def test_the_trace_of_a_preempted_request(caplog: pytest.LogCaptureFixture) -> None:
    with grpc_receiver() as receiver:
        async with traced(receiver.endpoint, replace(CONFIG, max_sequences=1)) as running:
            (shard,) = running.addresses
            low = asyncio.create_task(post(running, "low", body(prompt("a"), 600)))
            scheduler = running.engine.scheduler
            await eventually(lambda: any(len(one.output) > 2 for one in scheduler.sequences.values()), "it has tokens")
            await post(running, "high", {**body("b", 3), "priority": 5})
            assert await low == expected_text(prompt("a"), 600)
            span = await received(receiver, "low")
    assert span.event_names == ["queued", "started", "first_token", "preempted", "resumed", "finished"]
    assert span.event("preempted") == {"caravan.generation": 0, "caravan.shard": shard, "caravan.preemption": "swap"}
    resumed = span.event("resumed")
    assert resumed["caravan.shard"] == shard
    # The cells were saved, and only tokens of the steps that were under way then are computed again.
    assert resumed["caravan.recomputed_tokens"] < len(prompt("a"))
    messages = lines(caplog, span.trace_id)
    assert messages[0] == "sequence started"
    assert messages[1:-1] == ["sequence released", "sequence started", "sequence ended"]


@pytest.mark.usefixtures("copies_cost_as_guessed")
async def test_the_trace_of_a_migrated_request(caplog: pytest.LogCaptureFixture) -> None:
    with grpc_receiver() as receiver:
        async with traced(receiver.endpoint, replace(CONFIG, shards=2)) as running:
            moving = asyncio.create_task(post(running, "moving", body(prompt("a"), 200)))
            shards = running.engine.scheduler.shards
            await eventually(lambda: any(shard.stays.decoding for shard in shards.values()), "it decodes")
            [before] = [name for name, shard in shards.items() if shard.stays.residents]
            [after] = set(shards) - {before}
            await running.servers[before].drain()
            await running.stop_shard(before)
            assert await moving == expected_text(prompt("a"), 200)
            span = await received(receiver, "moving")
    assert span.event_names == ["queued", "started", "first_token", "preempted", "migrated", "resumed", "finished"]
    assert span.event("started")["caravan.shard"] == span.event("preempted")["caravan.shard"] == before
    assert span.event("migrated") == {
        "caravan.generation": 0,
        "caravan.shard.from": before,
        "caravan.shard.to": after,
    }
    assert lines(caplog, span.trace_id).count("sequence started") == 2


async def test_a_lost_shard_is_a_migration_without_preemption() -> None:
    with grpc_receiver() as receiver:
        async with traced(receiver.endpoint, replace(CONFIG, shards=2)) as running:
            moving = asyncio.create_task(post(running, "moving", body(prompt("a"), 150)))
            shards = running.engine.scheduler.shards
            await eventually(lambda: any(shard.stays.decoding for shard in shards.values()), "it decodes")
            [before] = [name for name, shard in shards.items() if shard.stays.residents]
            await running.stop_shard(before)
            assert await moving == expected_text(prompt("a"), 150)
            span = await received(receiver, "moving")
    names = [name for name in span.event_names if name != "first_token"]
    assert names == ["queued", "started", "migrated", "resumed", "finished"]
    assert span.event("resumed")["caravan.recomputed_tokens"] > len(prompt("a"))
    assert "caravan.other_numerics" not in span.event("resumed")


async def test_shards_that_compute_otherwise_are_logged_once_and_traced_for_who_moves_between_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = replace(CONFIG, shards=2, numerics=("one", "other"))
    with grpc_receiver() as receiver:
        async with traced(receiver.endpoint, config) as running:
            moving = asyncio.create_task(post(running, "moving", body(prompt("a"), 150)))
            shards = running.engine.scheduler.shards
            await eventually(lambda: any(shard.stays.decoding for shard in shards.values()), "it decodes")
            [before] = [name for name, shard in shards.items() if shard.stays.residents]
            await running.stop_shard(before)
            assert await moving == expected_text(prompt("a"), 150)
            span = await received(receiver, "moving")
            await running.start_shard(before)
            await running.wait_until_up(2)
    assert span.event("resumed")["caravan.other_numerics"] is True
    warnings = [record for record in caplog.records if "with other numerics" in record.getMessage()]
    assert len(warnings) == 1
    assert {f"{address}={name}" for address, name in zip(running.addresses, config.numerics, strict=True)} == set(
        warnings[0].__dict__["numerics"].split()
    )


async def test_each_generation_of_a_request_has_its_events() -> None:
    with grpc_receiver() as receiver:
        async with traced(receiver.endpoint) as running:
            wanted = body("hello", 5)
            wanted["parameters"] = {"max_new_tokens": 5, "best_of": 2, "do_sample": True}
            await post(running, "two", wanted)
            span = await received(receiver, "two")
    for number in range(2):
        names = [name for name, attributes in span.events if attributes["caravan.generation"] == number]
        assert names == ["queued", "started", "first_token", "finished"]
    assert span.attributes["gen_ai.usage.output_tokens"] <= 10
    assert span.attributes["gen_ai.usage.input_tokens"] < 2 * len("hello")
    assert len(span.attributes["gen_ai.response.finish_reasons"]) == 2


async def test_a_request_that_fails_says_why() -> None:
    with grpc_receiver() as receiver:
        async with traced(receiver.endpoint) as running, ClientSession(running.url) as session:
            late = {**body(prompt("a"), 200), "timeout": 0.1}
            async with session.post("/generate_stream", json=late, headers={"X-Request-Id": "late"}) as response:
                assert response.status == 200
                await response.read()
            async with session.post("/generate", json={"inputs": 7}, headers={"X-Request-Id": "bad"}) as response:
                assert response.status == 422
            late_span, bad_span = await received(receiver, "late"), await received(receiver, "bad")
    assert late_span.is_error
    assert late_span.attributes["error.type"] == late_span.event("failed")["error.type"] == "deadline"
    assert (bad_span.is_error, bad_span.attributes["http.response.status_code"], bad_span.events) == (False, 422, [])


async def test_a_client_that_leaves_is_no_error() -> None:
    with grpc_receiver() as receiver:
        async with traced(receiver.endpoint) as running:
            async with ClientSession(running.url) as session:
                headers = {"X-Request-Id": "gone"}
                async with session.post("/generate_stream", json=body("a", 2000), headers=headers) as response:
                    await response.content.readany()
                    response.close()
            span = await received(receiver, "gone")
    assert not span.is_error
    assert span.attributes["http.response.status_code"] == 499
    assert span.event("failed")["error.type"] == "dropped"


async def test_the_log_of_a_bug_names_the_trace(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def submit(*_: object) -> None:
        raise RuntimeError("a bug")

    with grpc_receiver() as receiver:
        async with traced(receiver.endpoint) as running, ClientSession(running.url) as session:
            monkeypatch.setattr(running.engine, "submit", submit)
            async with session.post("/generate", json=body("a", 2), headers={"X-Request-Id": "bug"}) as response:
                assert response.status == 500
            span = await received(receiver, "bug")
    assert span.is_error
    assert lines(caplog, span.trace_id) == ["request %s failed", "%s %s %d %.3f s"]


async def test_traces_are_sent_again_when_the_collector_is_back(caplog: pytest.LogCaptureFixture) -> None:
    flaky = [False, True]

    with grpc_receiver() as receiver:
        receiver.accepts = lambda: flaky.pop(0) if flaky else True
        async with traced(receiver.endpoint) as running:
            await post(running, "lost", body("a", 1))
            await eventually(lambda: "traces cannot be sent" in caplog.text, "it is logged")
            await post(running, "sent", body("a", 1))
            await received(receiver, "sent")
            await eventually(lambda: "traces are sent again" in caplog.text, "it is logged")
        assert receiver.span("lost") is None


async def test_the_span_continues_the_trace_of_the_client(caplog: pytest.LogCaptureFixture) -> None:
    with grpc_receiver() as receiver:
        async with traced(receiver.endpoint) as running:
            await post(running, "child", body("a", 3), traceparent=TRACEPARENT, tracestate="vendor=1")
            span = await received(receiver, "child")
    assert (span.trace_id, span.parent_id, span.tracestate) == (TRACE_ID, PARENT_ID, "vendor=1")
    assert "sequence started" in lines(caplog, TRACE_ID)


@pytest.mark.parametrize(
    "value",
    [
        "nonsense",
        f"00-{'0' * 32}-{PARENT_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"00-{TRACE_ID.upper()}-{PARENT_ID}-01",
        f"ff-{TRACE_ID}-{PARENT_ID}-01",
        f"{TRACEPARENT}-more",
        f"{TRACEPARENT}, {TRACEPARENT}",
    ],
)
async def test_an_invalid_traceparent_begins_a_new_trace(value: str) -> None:
    with grpc_receiver() as receiver:
        async with traced(receiver.endpoint) as running:
            await post(running, "new", body("a", 1), traceparent=value, tracestate="vendor=1")
            span = await received(receiver, "new")
    assert span.trace_id != TRACE_ID
    assert (span.parent_id, span.tracestate) == ("", "")


async def test_a_trace_that_is_not_sampled_is_only_named_in_logs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    with grpc_receiver() as receiver:
        async with traced(receiver.endpoint) as running:
            assert await post(running, "off", body("a", 3), traceparent=TRACEPARENT) == expected_text("a", 3)
        assert receiver.spans == []
    assert lines(caplog, TRACE_ID) == ["%s %s %d %.3f s"]
    assert lines(caplog, TRACE_ID, logging.DEBUG) == ["sequence started", "sequence ended", "%s %s %d %.3f s"]


async def test_the_flag_of_the_client_decides_whether_a_trace_is_sampled() -> None:
    with grpc_receiver() as receiver:
        async with traced(receiver.endpoint) as running:
            await post(running, "no", body("a", 1), traceparent=f"{TRACEPARENT[:-2]}00")
            await post(running, "yes", body("a", 1), traceparent=TRACEPARENT)
            await received(receiver, "yes")
        assert receiver.span("no") is None


@pytest.mark.parametrize("over_http", [False, True], ids=["grpc", "http"])
async def test_a_dead_collector_costs_spans_and_one_line_in_the_log(
    over_http: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Longer than the pause before the first retry, 0.8 to 1.2 s, whose message says why.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
    with grpc_receiver() as receiver:
        endpoint = receiver.endpoint
    # Nobody listens there any more.
    async with traced(endpoint, over_http=over_http) as running:
        for number in range(30):
            assert await post(running, str(number), body("a", 2)) == expected_text("a", 2)
        await eventually(lambda: "traces cannot be sent" in caplog.text, "it is logged")
    [line] = [record for record in caplog.records if "traces cannot be sent" in record.msg]
    assert "refused" in getattr(line, "reason", "")
    assert "opentelemetry" not in caplog.text
