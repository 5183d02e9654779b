"""Several models behind one router: which one a request is for, and how they are listed."""

import asyncio
import dataclasses
from typing import Any

import pytest

from caravan_dialects.api.limits import Limits
from caravan_testing.http_server import Service, serving
from caravan_testing.scripted_engine import CHAT_MODEL, Pause, ScriptedEngine, word
from caravan_testing.waiting import eventually

FIRST = dataclasses.replace(CHAT_MODEL, name="first")
SECOND = dataclasses.replace(
    CHAT_MODEL, name="second", fingerprint="2" * 16, adapters=("poet",), max_sequence_tokens=64, vocabulary_size=500
)


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(model=FIRST, others=[ScriptedEngine(model=SECOND)])


MESSAGES = [{"role": "user", "content": "a"}]
GENERATING: dict[str, dict[str, Any]] = {
    "/generate": {"inputs": "a"},
    "/generate_stream": {"inputs": "a"},
    "/": {"inputs": "a"},
    "/invocations": {"inputs": "a"},
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/api/generate": {"prompt": "a"},
    "/api/chat": {"messages": MESSAGES},
}
ANSWERING: dict[str, dict[str, Any]] = {
    **GENERATING,
    "/tokenize": {"inputs": "a"},
    "/detokenize": {"tokens": [101]},
    "/chat_tokenize": {"messages": MESSAGES},
    "/v1/embeddings": {"input": "a"},
    "/api/embed": {"input": "a"},
    "/api/embeddings": {"prompt": "a"},
    "/api/show": {},
}


def submitted(service: Service) -> dict[str, list[str]]:
    """Return the adapter of each generation that was submitted, by model."""
    return {
        engine.model.name: [stream.spec.adapter for stream in engine.streams]
        for engine in service.engine.engines
        if engine.streams
    }


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize(
    ("model", "chosen"),
    [
        ("first", {"first": [""]}),
        ("second", {"second": [""]}),
        ("pirate", {"first": ["pirate"]}),
        ("poet", {"second": ["poet"]}),
        ("", {"first": [""]}),
    ],
)
async def test_a_request_goes_to_the_model_that_it_names_itself_or_by_an_adapter(
    service: Service, path: str, model: str, chosen: dict[str, list[str]]
) -> None:
    response = await service.post(path, GENERATING[path] | {"model": model})
    assert response.status == 200, await response.text()
    await response.text()
    assert submitted(service) == chosen


@pytest.mark.parametrize("path", [path for path in GENERATING if not path.startswith("/api/")])
async def test_a_header_names_the_model_for_clients_that_cannot_and_the_body_prevails(
    service: Service, path: str
) -> None:
    for more, chosen in (({}, {"second": [""]}), ({"model": "first"}, {"first": [""], "second": [""]})):
        response = await service.post(path, GENERATING[path] | more, X_Model="second")
        assert response.status == 200, await response.text()
        await response.text()
        assert submitted(service) == chosen


async def test_tgis_adapter_id_chooses_the_model_that_has_the_adapter(service: Service) -> None:
    for adapter in ("poet", "pirate"):
        await service.reply("/generate", {"inputs": "a", "parameters": {"adapter_id": adapter}})
    assert submitted(service) == {"first": ["pirate"], "second": ["poet"]}
    body = {"inputs": "a", "model": "first", "parameters": {"adapter_id": "poet"}}
    response = await service.post("/generate", body)
    assert (response.status, (await response.json())["error_type"]) == (422, "validation")


@pytest.mark.parametrize("path", ["/api/generate", "/api/chat"])
@pytest.mark.parametrize(
    ("model", "chosen"), [("second:latest", {"second": [""]}), ("poet:latest", {"second": ["poet"]})]
)
async def test_ollamas_default_tag_is_no_part_of_the_name(
    service: Service, path: str, model: str, chosen: dict[str, list[str]]
) -> None:
    await (await service.post(path, GENERATING[path] | {"model": model})).text()
    assert submitted(service) == chosen


MESSAGE = "The model does not exist. GET /v1/models lists those that do. Given: third"


@pytest.mark.parametrize("path", ANSWERING)
async def test_an_unknown_model_is_not_found(service: Service, path: str) -> None:
    response = await service.post(path, ANSWERING[path] | {"model": "third"})
    assert response.status == 404
    error = await response.json()
    if path.startswith("/v1/"):
        error = error["error"]
        assert error == {
            "message": MESSAGE,
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
    else:
        assert error == {"error": MESSAGE, "error_type": "model_not_found"}
    assert not submitted(service)
    assert service.is_idle()


@pytest.mark.parametrize("path", ANSWERING)
async def test_a_single_model_answers_to_every_name(service: Service, path: str) -> None:
    service.engine.others.clear()
    response = await service.post(path, ANSWERING[path] | {"model": "third"})
    assert response.status == 200, await response.text()
    await response.text()


@pytest.mark.parametrize(("model", "status"), [("first", 200), (None, 200), ("second", 503), ("third", 404)])
async def test_a_model_that_is_expected_is_waited_for_and_answers_to_its_name_only(
    service: Service, model: str | None, status: int
) -> None:
    service.engine.others.clear()
    service.engine.expected = ("first", "second")
    response = await service.post("/v1/completions", {"prompt": "a", "model": model})
    assert response.status == status


async def test_the_first_expected_model_is_the_default(service: Service) -> None:
    service.engine.expected = ("second", "first")
    assert (await service.reply("/v1/completions", {"prompt": "a"}))["model"] == "second"
    service.engine.others.clear()
    response = await service.post("/v1/completions", {"prompt": "a"})
    error = (await response.json())["error"]
    assert (response.status, error["code"]) == (503, "no_shard")
    assert error["message"] == "No shard of the model second is up"


async def test_limits_and_vocabulary_are_those_of_the_model(service: Service) -> None:
    for model, status in (("first", 200), ("second", 400)):
        response = await service.post("/v1/completions", {"prompt": "a" * 70, "model": model})
        assert response.status == status, model
        response = await service.post("/v1/completions", {"prompt": [600], "model": model})
        assert response.status == status, model


async def test_all_models_are_listed(service: Service) -> None:
    listed = (await (await service.client.get("/v1/models")).json())["data"]
    names = ["first", "pirate", "second", "poet"]
    assert [(entry["id"], entry["parent"]) for entry in listed] == list(
        zip(names, [None, "first", None, "second"], strict=True)
    )
    for path in ("/api/tags", "/api/ps"):
        tags = (await (await service.client.get(path)).json())["models"]
        assert [tag["name"] for tag in tags] == names
        assert [tag["digest"] for tag in tags] == [FIRST.fingerprint] * 2 + [SECOND.fingerprint] * 2
    for entry in listed:
        assert await (await service.client.get(f"/v1/models/{entry['id']}")).json() == entry
    response = await service.client.get("/v1/models/third")
    assert (response.status, (await response.json())["error"]["code"]) == (404, "model_not_found")


async def test_a_model_is_described_by_its_name(service: Service) -> None:
    for name, length in (("first", 256), ("second", 64), ("poet", 64)):
        shown = await service.reply("/api/show", {"model": name})
        assert shown["model_info"]["caravan.context_length"] == length
    for headers, name, length in (({}, "first", 256), ({"X-Model": "second"}, "second", 64)):
        info = await (await service.client.get("/info", headers=headers)).json()
        assert (info["model_id"], info["max_total_tokens"]) == (name, length)
        assert info["models"] == ["first", "second"]
    assert (await service.client.get("/info", headers={"X-Model": "third"})).status == 404


async def test_requests_are_counted_by_model(service: Service) -> None:
    for model, times in (("second", 2), ("poet", 1), ("first", 4), ("third", 3)):
        for _ in range(times):
            await service.post("/v1/completions", {"prompt": "a", "model": model})
    exposed = await (await service.client.get("/metrics")).text()
    for model, arrived in (("first", 4), ("second", 3), ("", 3)):
        assert f'\ntgi_request_count{{model="{model}"}} {arrived}\n' in exposed
        assert f'\ntgi_request_success{{model="{model}"}} {arrived if model else 0}\n' in exposed
    assert '\ntgi_request_failure{err="validation",model=""} 3\n' in exposed


async def test_requests_in_progress_show_their_model(service: Service) -> None:
    for engine in service.engine.engines:
        engine.script = lambda _: [word("a"), Pause(), word("b")]
    streams = [
        await service.post("/v1/completions", {"prompt": "a", "model": model, "stream": True})
        for model in ("second", "first", "poet")
    ]
    listed = (await (await service.client.get("/v1/requests")).json())["data"]
    assert [entry["model"] for entry in listed] == ["second", "first", "poet"]
    for engine in service.engine.engines:
        engine.resume.set()
    for stream in streams:
        await stream.text()


async def test_instances_of_vertex_are_for_one_model(service: Service) -> None:
    instances: list[dict[str, Any]] = [{"inputs": "a", "model": "second"}, {"messages": MESSAGES, "model": "second"}]
    await service.reply("/vertex", {"instances": instances})
    assert submitted(service) == {"second": ["", ""]}
    instances[1]["model"] = "first"
    response = await service.post("/vertex", {"instances": instances})
    assert response.status == 422
    assert "instances[1].model" in (await response.json())["error"]


async def test_a_flood_of_one_model_takes_no_permit_of_another(engine: ScriptedEngine) -> None:
    [second] = engine.others
    engine.script = lambda _: [Pause(), word("a")]
    async with serving(engine, Limits(max_concurrent_requests=2)) as service:
        flood = [asyncio.ensure_future(service.post("/generate", {"inputs": "a"})) for _ in range(2)]
        await eventually(lambda: len(engine.streams) == 2)
        assert (await service.post("/generate", {"inputs": "a"})).status == 429
        for path in ("/generate", "/v1/embeddings"):
            assert (await service.post(path, ANSWERING[path] | {"model": "second"})).status == 200
        assert (await service.post("/v1/completions", {"prompt": "a", "model": "second", "n": 3})).status == 429
        assert len(second.streams) == 1
        for request in flood:
            request.cancel()
        await eventually(service.is_idle)


@pytest.mark.parametrize("path", [path for path in GENERATING if path != "/vertex"])
async def test_a_model_answers_to_its_aliases(path: str) -> None:
    second = ScriptedEngine(model=dataclasses.replace(SECOND, aliases=("claude-second", "2nd")))
    async with serving(ScriptedEngine(model=FIRST, others=[second])) as service:
        for name in ("claude-second", "2nd"):
            response = await service.post(path, GENERATING[path] | {"model": name})
            assert response.status == 200, await response.text()
            await response.text()
        assert submitted(service) == {"second": ["", ""]}


async def test_aliases_are_listed() -> None:
    second = ScriptedEngine(
        model=dataclasses.replace(SECOND, aliases=("claude-second", "2nd"), modified_s=1_700_000_000)
    )
    async with serving(ScriptedEngine(model=FIRST, others=[second])) as service:
        listed = {entry["id"]: entry for entry in (await (await service.client.get("/v1/models")).json())["data"]}
        assert listed["second"]["aliases"] == ["claude-second", "2nd"]
        assert listed["second"]["created"] == listed["poet"]["created"] == 1_700_000_000
        assert "aliases" not in listed["first"]
        assert "aliases" not in listed["poet"]
        assert await (await service.client.get("/v1/models/2nd")).json() == listed["second"]
        version = {"anthropic-version": "2023-06-01"}
        page = await (await service.client.get("/v1/models", headers=version)).json()
        names = [entry["id"] for entry in page["data"]]
        assert names == ["first", "pirate", "second", "claude-second", "2nd", "poet"]
        [found] = [entry for entry in page["data"] if entry["id"] == "claude-second"]
        assert found["created_at"] == "2023-11-14T22:13:20Z"
        assert await (await service.client.get("/v1/models/claude-second", headers=version)).json() == found
