"""What operators set for the whole server: one key, a path before all paths, and who reads the metrics."""

from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from caravan_proto.telemetry import ACCESS_LOG, LogFileError, LogSettings, configure_logging
from caravan_router.auth.keyring import single_key
from caravan_router.config import RouterConfig
from caravan_router.http.app import Access
from caravan_router.http.metrics import MetricsAccess, MetricsPortError, serving_metrics
from caravan_router.metrics.recorder import Metrics
from caravan_testing.http_server import serving
from caravan_testing.scripted_engine import CHAT_MODEL, ScriptedEngine

PROMPT = {"prompt": "hi", "max_tokens": 2}


async def test_a_single_key_opens_all_routes() -> None:
    async with serving(ScriptedEngine(), access=Access(keyring=single_key("s3cret"))) as service:
        assert (await service.post("/v1/completions", PROMPT)).status == 401
        assert (await service.post("/v1/completions", PROMPT, Authorization="Bearer other")).status == 401
        assert (await service.post("/v1/completions", PROMPT, Authorization="Bearer s3cret")).status == 200
        assert (await service.post("/v1/completions", PROMPT, x_api_key="s3cret")).status == 200
        async with service.client.get("/admin/shards", headers={"Authorization": "Bearer s3cret"}) as response:
            assert response.status == 200


@pytest.mark.parametrize("prefix", ["/ai/caravan", ""], ids=["kept by the proxy", "stripped by the proxy"])
async def test_all_routes_are_under_the_root_path(prefix: str) -> None:
    access = Access(root_path="/ai/caravan")
    async with serving(ScriptedEngine(model=CHAT_MODEL), access=access) as service:
        assert (await service.reply(f"{prefix}/v1/completions", PROMPT))["choices"]
        assert (
            await service.post(f"{prefix}/api/generate", {"model": "m", "prompt": "hi", "stream": False})
        ).status == 200
        async with service.client.get(f"{prefix}/v1/models?x=1") as response:
            assert response.status == 200
        async with service.client.get(f"{prefix}/", headers={"Accept": "text/html"}) as response:
            page = await response.text()
        # Its paths are relative, so that a browser asks below the root path.
        script = next(part for part in page.split('"') if part.endswith("main.js"))
        assert not script.startswith("/")
        async with service.client.get(f"{prefix}/{script}") as response:
            assert response.status == 200
        async with service.client.get(f"{prefix}/openapi.json") as response:
            assert (await response.json())["servers"] == [{"url": "/ai/caravan"}]
        async with service.client.get(f"{prefix}/nothing") as response:
            assert response.status == 404


async def test_the_root_path_without_a_slash_leads_to_the_page() -> None:
    access = Access(root_path="/ai", keyring=single_key("s3cret"))
    async with serving(ScriptedEngine(), access=access) as service:
        async with service.client.get("/ai", allow_redirects=False) as response:
            assert (response.status, response.headers["Location"]) == (308, "/ai/")
        assert await service.sample('caravan_http_requests_total{handler="/ai",method="GET",status="308"}') == 1
        # Keys are asked for as without it, and a longer name is no root path.
        assert (await service.post("/ai/v1/completions", PROMPT)).status == 401
        assert (await service.post("/aix/v1/completions", PROMPT, Authorization="Bearer s3cret")).status == 404


async def test_metrics_may_ask_for_a_key() -> None:
    async with serving(ScriptedEngine(), access=Access(metrics=MetricsAccess(key="m-key"))) as service:
        for given, status in (("", 401), ("Bearer other", 401), ("Bearer m-key", 200)):
            async with service.client.get("/metrics", headers={"Authorization": given} if given else {}) as response:
                assert response.status == status, given


async def test_metrics_may_have_a_port_of_their_own() -> None:
    access = MetricsAccess(key="m-key", port=0)
    async with (
        serving(ScriptedEngine(), access=Access(metrics=access)) as service,
        serving_metrics(Metrics(), access, "127.0.0.1") as url,
        ClientSession() as client,
    ):
        async with service.client.get("/metrics") as response:
            assert response.status == 404
        async with client.get(url) as response:
            assert response.status == 401
        async with client.get(url, headers={"Authorization": "Bearer m-key"}) as response:
            assert response.headers["Content-Type"].startswith("text/plain")
            assert "# TYPE" in await response.text()
        async with client.get(url.removesuffix("/metrics") + "/v1/models") as response:
            assert response.status == 404


async def test_only_routers_that_take_over_share_a_port_of_metrics() -> None:
    async with serving_metrics(Metrics(), MetricsAccess(port=0, shared=True), "127.0.0.1") as url:
        port = int(url.rpartition(":")[2].removesuffix("/metrics"))
        async with serving_metrics(Metrics(), MetricsAccess(port=port, shared=True), "127.0.0.1") as shared:
            assert shared == url
        with pytest.raises(MetricsPortError, match=f"^--metrics-port {port}: .*in use"):
            async with serving_metrics(Metrics(), MetricsAccess(port=port), "127.0.0.1"):
                raise AssertionError("two routers listen")


def test_the_log_may_be_a_file_without_a_line_for_each_request(tmp_path: Path) -> None:
    import logging

    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    file = tmp_path / "caravan.log"
    try:
        configure_logging(LogSettings(level="info", file=str(file), access=False))
        logging.getLogger(ACCESS_LOG).info("GET / 200")
        logging.getLogger("caravan").info("ready")
        file.rename(tmp_path / "caravan.log.1")
        logging.getLogger("caravan").info("rotated")
        with pytest.raises(LogFileError, match="--log-file: cannot write"):
            configure_logging(LogSettings(level="info", file=str(tmp_path / "missing" / "x")))
    finally:
        for handler in set(root.handlers) - set(before):
            handler.close()
        root.handlers[:] = before
        root.setLevel(level)
        logging.getLogger(ACCESS_LOG).disabled = False
    assert [line.rpartition(": ")[2] for line in (tmp_path / "caravan.log.1").read_text().splitlines()] == ["ready"]
    assert file.read_text().endswith("caravan: rotated\n")


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"api_key": "a", "api_keys_file": "f"}, "--api-key and --api-keys-file exclude each other"),
        ({"api_key": ""}, "--api-key must have printable characters"),
        ({"api_key": "a b"}, "--api-key must have printable characters"),
        ({"metrics_key": "ä"}, "--metrics-key must have printable characters"),
        ({"root_path": "/a/"}, "Given: '/a/'"),
        ({"root_path": "a"}, "Given: 'a'"),
        ({"root_path": "/"}, "Given: '/'"),
    ],
)
def test_what_cannot_be_set(flags: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem.replace("(", "\\(")):
        RouterConfig(**flags)
