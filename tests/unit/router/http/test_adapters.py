"""Adapters by name: TGI's ``adapter_id``, OpenAI's ``model``."""

import dataclasses
from typing import Any

import pytest

from caravan_testing.http_server import Service, events
from caravan_testing.scripted_engine import MODEL


@pytest.mark.parametrize(("adapter_id", "adapter"), [("pirate", "pirate"), (None, "")])
@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/"])
async def test_tgis_adapter_id_selects_the_adapter(
    service: Service, path: str, adapter_id: str | None, adapter: str
) -> None:
    response = await service.post(path, {"inputs": "a", "parameters": {"adapter_id": adapter_id}})
    assert response.status == 200, await response.text()
    await response.text()
    assert service.engine.spec.adapter == adapter


@pytest.mark.parametrize(("model", "adapter"), [("pirate", "pirate"), ("tgi", ""), ("../etc", ""), (None, "")])
async def test_openais_model_selects_the_adapter(service: Service, model: str | None, adapter: str) -> None:
    body: dict[str, Any] = {"prompt": "a", "model": model, "max_tokens": 1, "n": 2}
    reply = await (await service.post("/v1/completions", body)).json()
    chunk, *_ = events(await (await service.post("/v1/completions", body | {"stream": True})).text())
    assert reply["model"] == chunk["model"] == (adapter or MODEL.name)
    assert [stream.spec.adapter for stream in service.engine.streams] == [adapter] * 4


async def test_a_router_without_adapters(service: Service) -> None:
    service.engine.model = dataclasses.replace(MODEL, adapters=())
    response = await service.post("/generate", {"inputs": "a", "parameters": {"adapter_id": "pirate"}})
    assert response.status == 422
    assert (await response.json())["error"] == (
        "Input validation error: `adapter_id` must be one of the adapters served: there are none. Given: 'pirate'"
    )
    assert [model["id"] for model in (await (await service.client.get("/v1/models")).json())["data"]] == ["scripted"]
