"""``/v1/models`` answers Anthropic's clients, who send ``anthropic-version``, in Anthropic's form."""

import re
from dataclasses import replace
from typing import Any

import pytest

from caravan_dialects.api.anthropic.models import shown_models
from caravan_dialects.api.openai.schema import Model
from caravan_testing.http_server import Service, serving
from caravan_testing.scripted_engine import CHAT_MODEL, ScriptedEngine

VERSION = {"anthropic-version": "2023-06-01"}
OTHERS = [replace(CHAT_MODEL, name=f"m{number}", fingerprint=str(number) * 16, adapters=()) for number in range(4)]


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(model=CHAT_MODEL, others=[ScriptedEngine(model=model) for model in OTHERS])


async def listed(service: Service, query: str = "") -> dict[str, Any]:
    response = await service.client.get(f"/v1/models{query}", headers=VERSION)
    assert response.status == 200, await response.text()
    body: dict[str, Any] = await response.json()
    return body


async def test_the_list_has_anthropics_form(service: Service) -> None:
    page = await listed(service)
    first, adapter = page["data"][:2]
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ", first["created_at"])
    expected = {"type": "model", "id": "scripted", "display_name": "scripted", "created_at": first["created_at"]}
    assert first == expected | {"lifecycle": "active", "max_input_tokens": 256, "max_tokens": 256}
    assert adapter == first | {"id": "pirate", "display_name": "pirate"}
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("scripted", "m3", False)
    response = await service.client.get("/v1/models/pirate", headers=VERSION)
    assert await response.json() == adapter
    assert (await (await service.client.get("/v1/models")).json())["object"] == "list"


@pytest.mark.parametrize(
    ("query", "names", "more"),
    [
        ("?limit=2", ["scripted", "pirate"], True),
        ("?limit=1000", ["scripted", "pirate", "m0", "m1", "m2", "m3"], False),
        ("?limit=2&after_id=m1", ["m2", "m3"], False),
        ("?limit=1&after_id=m1", ["m2"], True),
        ("?limit=2&before_id=m2", ["m0", "m1"], True),
        ("?limit=9&before_id=m0", ["scripted", "pirate"], False),
        ("?after_id=scripted&before_id=m1", ["pirate", "m0"], False),
        ("?after_id=m3", [], False),
    ],
)
async def test_pages(service: Service, query: str, names: list[str], more: bool) -> None:
    page = await listed(service, query)
    assert ([entry["id"] for entry in page["data"]], page["has_more"]) == (names, more)
    assert (page["first_id"], page["last_id"]) == ((names[0], names[-1]) if names else (None, None))


@pytest.mark.parametrize("query", ["?limit=0", "?limit=1001", "?limit=x", "?after_id=x", "?before_id=x"])
async def test_errors_have_anthropics_form(service: Service, query: str) -> None:
    response = await service.client.get(f"/v1/models{query}", headers=VERSION)
    body = await response.json()
    assert (response.status, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")
    assert query[1:].partition("=")[0] in body["error"]["message"]
    response = await service.client.get("/v1/models/other", headers=VERSION)
    assert (response.status, (await response.json())["error"]["type"]) == (404, "not_found_error")
    response = await service.client.get("/v1/models/other")
    assert (await response.json())["error"]["code"] == "model_not_found"


async def test_without_a_shard(engine: ScriptedEngine) -> None:
    async with serving(ScriptedEngine(joined=False)) as service:
        response = await service.client.get("/v1/models", headers=VERSION)
        assert (response.status, (await response.json())["error"]["type"]) == (503, "overloaded_error")


def test_every_name_has_an_entry() -> None:
    model = Model("m", "model", 0, "m", "m", None, aliases=("claude-m", "m.gguf"))
    shown = shown_models([model, Model("n", "model", 0, "n", "n", None)], {"m": 512})
    assert [(entry.id, entry.max_tokens) for entry in shown] == [
        ("m", 512),
        ("claude-m", 512),
        ("m.gguf", 512),
        ("n", None),
    ]
    assert {entry.created_at for entry in shown} == {"1970-01-01T00:00:00Z"}
