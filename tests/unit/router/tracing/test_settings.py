"""Flags and standard variables decide whether traces are sent; OpenTelemetry is imported only if they are."""

import importlib.util
import subprocess
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec

import pytest
from opentelemetry.sdk.resources import SERVICE_NAME

from caravan_router.config import RouterConfig
from caravan_router.tracing.export import SpanSender
from caravan_router.tracing.settings import TraceSettings, TracingError, read_settings

URL = "http://127.0.0.1:4317"


@pytest.mark.parametrize(
    ("flag", "environ", "expected"),
    [
        (None, {}, None),
        (None, {"OTEL_SERVICE_NAME": "mine", "OTEL_TRACES_SAMPLER": "always_on"}, None),
        (URL, {}, TraceSettings(endpoint=URL, service_name=None)),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": URL}, TraceSettings(endpoint=None, service_name=None)),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": URL}, TraceSettings(endpoint=None, service_name=None)),
        (URL, {"OTEL_SDK_DISABLED": "true"}, None),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": URL, "OTEL_TRACES_EXPORTER": "none"}, None),
        (
            URL,
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
            TraceSettings(endpoint=URL, service_name=None, over_http=True),
        ),
        (
            URL,
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"},
            TraceSettings(endpoint=URL, service_name=None),
        ),
    ],
)
def test_what_turns_traces_on(flag: str | None, environ: Mapping[str, str], expected: TraceSettings | None) -> None:
    assert read_settings(flag, None, environ) == expected


def test_an_unknown_protocol_is_refused() -> None:
    with pytest.raises(TracingError, match=r"must be grpc or http/protobuf. Given: 'http/json'"):
        read_settings(URL, None, {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"})


@pytest.fixture
def without_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def missing(name: str, package: str | None = None) -> ModuleSpec | None:
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError(name)
        return find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", missing)


@pytest.mark.usefixtures("without_opentelemetry")
def test_the_flag_without_opentelemetry_is_an_error_that_names_the_packages() -> None:
    with pytest.raises(TracingError, match=r"--otlp-endpoint needs packages .*: pip install 'opentelemetry-sdk>=1"):
        read_settings(URL, None, {})


@pytest.mark.usefixtures("without_opentelemetry")
def test_the_variable_without_opentelemetry_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert read_settings(None, None, {"OTEL_EXPORTER_OTLP_ENDPOINT": URL}) is None
    assert (
        "no traces are sent, which needs packages that are not installed: pip install 'opentelemetry-sdk" in caplog.text
    )


def test_a_url_needs_a_scheme() -> None:
    with pytest.raises(
        ValueError, match=r"--otlp-endpoint must begin with http:// or https://. Given: 'localhost:4317'"
    ):
        RouterConfig(otlp_endpoint="localhost:4317")


@pytest.mark.parametrize(
    ("flag", "environ", "expected"),
    [
        (None, {}, "caravan-router"),
        (None, {"OTEL_SERVICE_NAME": "mine"}, "mine"),
        (None, {"OTEL_RESOURCE_ATTRIBUTES": "service.name=theirs"}, "theirs"),
        ("flag", {"OTEL_SERVICE_NAME": "mine"}, "flag"),
    ],
)
def test_the_name_of_the_service(
    flag: str | None, environ: Mapping[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    sender = SpanSender(TraceSettings(endpoint=URL, service_name=flag))
    assert sender.provider.resource.attributes[SERVICE_NAME] == expected
    sender.close()


_STARTED = """
import asyncio, sys
import caravan_serve.commands, caravan_serve.cli
from caravan_router.app import run_router
from caravan_router.config import RouterConfig

async def main():
    stop = asyncio.Event()
    await run_router(RouterConfig(port=0), stop, lambda fleet, url: stop.set())

asyncio.run(main())
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""


def test_a_router_without_traces_imports_no_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    done = subprocess.run([sys.executable, "-c", _STARTED], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout.strip() == "[]"


def test_the_command_without_a_working_configuration_says_so_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    command = [sys.executable, "-m", "caravan_serve", "router", "--shard", "unix:/x", "--otlp-endpoint", URL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "caravan-router: error: the protocol of OTLP must be grpc or http/protobuf. Given: 'http/json'\n"
    )
