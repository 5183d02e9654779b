"""Files for other platforms: they parse as the platform's own, and Caravan takes what they ask of it."""

import importlib.util
import json
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jsonschema
import pytest
import yaml
from deploy.chart import complaints_about
from deploy.tools import ROOT, run_tool

from caravan_proto import __version__
from caravan_router.metrics.table import METRICS, Kind
from caravan_serve.cli import read_flags

SCHEMAS = Path(__file__).parent / "crds/platforms"
KSERVE = ROOT / "deploy/kserve"
PLATFORMS = ROOT / "deploy/platforms"
ROUTES = json.loads((ROOT / "router/caravan_router/http/openapi.json").read_text())["paths"]


def runtime() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((KSERVE / "cluster-serving-runtime.yaml").read_text())
    return found


def service_config() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((KSERVE / "llm-inference-service-config.yaml").read_text())
    return found


PODS = {
    "ClusterServingRuntime": lambda: runtime()["spec"],
    "LLMInferenceServiceConfig": lambda: service_config()["spec"]["template"],
}


@pytest.mark.parametrize("document", [runtime(), service_config()], ids=lambda document: str(document["kind"]))
def test_kserve_takes_its_objects(document: dict[str, Any]) -> None:
    schema = json.loads((SCHEMAS / f"{document['kind']}.json").read_text())
    jsonschema.validate(document, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document | {"spec": document["spec"] | {"unknown": {}}}, schema)


@pytest.mark.parametrize("kind", PODS)
def test_kubernetes_takes_the_pods_of_kserve(kind: str) -> None:
    spec = {key: value for key, value in PODS[kind]().items() if key in ("containers", "volumes")}
    assert complaints_about([{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}]) == []


@pytest.mark.parametrize(
    ("kind", "container"), [("ClusterServingRuntime", "kserve-container"), ("LLMInferenceServiceConfig", "main")]
)
def test_caravan_takes_the_flags_and_answers_the_probes_of_kserve(kind: str, container: str) -> None:
    (found,) = PODS[kind]()["containers"]
    assert found["name"] == container
    assert found["image"] == f"caravan-serve:{__version__}"
    words = [*found.get("command", ["caravan"]), *found["args"]]
    # What the controllers replace.
    words = [re.sub(r"\{\{ ?[.A-Za-z]+ ?\}\}", "qwen", word) for word in words]
    assert words[:2] == ["caravan", "serve"]
    _serve, router, models, shards = read_flags(words[2:])
    assert models == ["/mnt/models"]
    assert shards["alias"] == "qwen"
    assert router.vllm_metrics
    (port,) = found["ports"]
    assert router.port == port["containerPort"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = found[probe]["httpGet"]
        assert asked["port"] == router.port
        assert asked["path"] in ROUTES


def test_the_picker_of_llm_d_reads_metrics_that_routers_have() -> None:
    config = yaml.safe_load((PLATFORMS / "llm-d.yaml").read_text())
    plugins = {plugin["type"]: plugin.get("parameters", {}) for plugin in config["plugins"]}
    (engine,) = plugins["core-metrics-extractor"]["engineConfigs"]
    gauges = {metric.name for metric in METRICS if metric.kind is Kind.GAUGE}
    assert {value for key, value in engine.items() if key.endswith("Spec")} <= gauges
    (profile,) = config["schedulingProfiles"]
    assert {used["pluginRef"] for used in profile["plugins"]} <= set(plugins)


def test_the_router_of_production_stack_finds_two_releases_of_one_model() -> None:
    router = yaml.safe_load((PLATFORMS / "production-stack.yaml").read_text())["routerSpec"]
    backends, models = router["staticBackends"].split(","), router["staticModels"].split(",")
    # One model for each backend.
    assert len(backends) == len(models) == 2
    # The names of Services of releases `a` and `b`.
    assert [re.fullmatch(r"http://([ab])-caravan-router:80", url)[1] for url in backends] == ["a", "b"]  # type: ignore[index]
    assert {"/v1/models", "/metrics", "/version", "/is_sleeping", "/health"} <= set(ROUTES)
    documents = (ROOT / "docs/http-api.md").read_text()
    assert f"`{router['sessionKey']}`" in documents.lower()


def test_skyserve_asks_a_route_and_runs_a_command_that_there_are() -> None:
    task = yaml.safe_load((PLATFORMS / "skypilot.yaml").read_text())
    assert task["service"]["readiness_probe"]["path"] in ROUTES
    program, command, *words = shlex.split(task["run"])
    assert (program, command) == ("caravan", "serve")
    _serve, router, models, _shards = read_flags(words)
    assert (router.port, router.hostname) == (task["resources"]["ports"], "0.0.0.0")
    assert len(models) == 1
    assert set(task["envs"]) == {"CARAVAN_API_KEY"}


def test_nomad_asks_a_route_and_runs_a_command_that_there_are() -> None:
    program = "import hcl2, json, sys; print(json.dumps(hcl2.load(sys.stdin)))"
    parsed = run_tool("python", "-c", program, stdin=(PLATFORMS / "caravan.nomad.hcl").read_text())
    job = json.loads(parsed.replace('\\"', ""))["job"][0]["caravan"]
    group = job["group"][0]["serve"]
    (service,) = group["service"]
    assert service["check"][0]["path"] in ROUTES
    task = group["task"][0]["caravan"]
    (config,) = task["config"]
    assert config["image"].endswith(f"caravan-serve:{__version__}")
    (port_name,) = group["network"][0]["port"][0]
    assert config["ports"] == [port_name]
    port = 20_000
    words = [word.replace(f"${{NOMAD_PORT_{port_name}}}", str(port)) for word in config["args"]]
    assert words[0] == "serve"
    _serve, router, _models, _shards = read_flags(words[1:])
    assert router.port == port
    # Running requests end before the task is killed.
    assert float(task["kill_timeout"].removesuffix("s")) > router.graceful_termination_timeout


class Request:
    """A request as Ray's types are: of pydantic."""

    def __init__(self, **fields: Any) -> None:
        self._fields = fields

    def model_dump(self, **_options: Any) -> dict[str, Any]:
        return dict(self._fields)


@pytest.fixture
def ray_engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the engine, with a stand-in for the types of Ray, which keep their fields."""
    types = ModuleType("ray.serve.llm.openai_api_models")
    for name in ("ChatCompletionResponse", "CompletionResponse", "EmbeddingResponse", "ErrorResponse"):
        setattr(types, name, type(name, (SimpleNamespace,), {}))
    for name in ("ray", "ray.serve", "ray.serve.llm"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["ray.serve.llm"].openai_api_models = types  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, types.__name__, types)
    spec = importlib.util.spec_from_file_location("ray_serve", PLATFORMS / "ray_serve.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def test_the_engine_for_ray_answers_streams_and_refuses(ray_engine: Any) -> None:
    loading = SimpleNamespace(model_id="qwen", model_source="toy.gguf")
    engine = ray_engine.CaravanEngine(
        SimpleNamespace(model_loading_config=loading, engine_kwargs={"backend": "fake", "ctx_size": 512})
    )
    with pytest.raises(RuntimeError, match="is not started"):
        await engine.check_health()
    await engine.start()
    try:
        await engine.check_health()
        request = {"model": "qwen", "prompt": "a", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        (reply,) = [part async for part in engine.completions(Request(**request))]
        assert type(reply).__name__ == "CompletionResponse"
        assert reply.usage["completion_tokens"] == 4
        events = [part async for part in engine.completions(Request(**request, stream=True))]
        assert events[-1] == "data: [DONE]\n\n"
        assert all(re.fullmatch(r"data: .+\n\n", event) for event in events)
        texts = [json.loads(event[6:])["choices"][0]["text"] for event in events[:-1]]
        assert "".join(texts) == reply.choices[0]["text"]
        messages = [{"role": "user", "content": "a"}]
        (chat,) = [part async for part in engine.chat(Request(model="qwen", messages=messages, max_tokens=2))]
        assert type(chat).__name__ == "ChatCompletionResponse"
        (refused,) = [part async for part in engine.completions(Request(model="qwen", prompt="a", max_tokens="many"))]
        assert type(refused).__name__ == "ErrorResponse"
    finally:
        await engine.stop()
