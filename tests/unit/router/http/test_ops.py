"""The page at `/`: who gets it, what its files are, and what they may do."""

import base64
import gzip
import hashlib
import json
import logging
import re
import tomllib
from collections.abc import AsyncIterator, Sequence
from importlib import resources

import pytest
from aiohttp import ClientSession

from caravan_proto.messages.model import TokenizedText
from caravan_router.http.app import Access
from caravan_router.http.openapi import document
from caravan_router.http.ops import openapi_document
from caravan_router.http.page import page
from caravan_router.http.server.middleware import PAGE_HEADER
from caravan_router.http.server.state import STATE
from caravan_scheduler.planning.waiting_reason import WaitingReason
from caravan_testing.http_server import Service, keys, serving
from caravan_testing.scripted_engine import ScriptedEngine

BROWSER = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
FILES = resources.files("caravan_studio.page")
MOST_BYTES = 400_000


@pytest.mark.parametrize("path", ["/", "/health", "/v1/health", "/ping"])
async def test_health(service: Service, path: str) -> None:
    response = await service.client.get(path)
    assert (response.status, await response.read()) == (200, b"")
    service.engine.healthy = False
    response = await service.client.get(path)
    assert response.status == 503
    assert await response.json() == {"error": "unhealthy", "error_type": "healthcheck"}


async def test_readiness_needs_a_first_shard_and_liveness_none(service: Service) -> None:
    async def status(path: str) -> int:
        return (await service.client.get(path)).status

    service.engine.healthy = service.engine.ready = False
    assert (await status("/livez"), await status("/readyz")) == (200, 503)
    service.engine.ready = True
    assert (await status("/readyz"), await status("/health")) == (200, 503)


async def test_info(service: Service) -> None:
    info = await (await service.client.get("/info")).json()
    assert info["model_id"] == "scripted"
    assert info["router"] == "text-generation-router"
    assert (info["max_input_tokens"], info["max_total_tokens"]) == (255, 256)
    assert info["max_batch_total_tokens"] == 4096


@pytest.mark.parametrize("path", ["/info", "/v1/models"])
async def test_there_is_no_model_before_the_first_shard_joins(service: Service, path: str) -> None:
    service.engine.joined = False
    assert (await service.client.get(path)).status == 503


async def test_models(service: Service) -> None:
    started_s = service.app[STATE].started_s
    assert await (await service.client.get("/v1/models")).json() == {
        "object": "list",
        "data": [
            {
                "id": "scripted",
                "object": "model",
                "created": started_s,
                "owned_by": "scripted",
                "root": "scripted",
                "parent": None,
            },
            {
                "id": "pirate",
                "object": "model",
                "created": started_s,
                "owned_by": "scripted",
                "root": "pirate",
                "parent": "scripted",
            },
        ],
    }


async def test_tokenize(service: Service) -> None:
    response = await service.post("/tokenize", {"inputs": "né"})
    assert await response.json() == [
        {"id": 1, "text": "<s>", "start": 0, "stop": 0},
        {"id": 210, "text": "n", "start": 0, "stop": 1},
        {"id": 333, "text": "é", "start": 1, "stop": 2},
    ]
    response = await service.post("/tokenize", {"inputs": "n", "add_special_tokens": False})
    assert [token["text"] for token in await response.json()] == ["n"]
    assert (await service.post("/tokenize", {"inputs": ""})).status == 422


async def test_detokenize(service: Service) -> None:
    for tokens, text in [([210, 333], "né"), ([1, 210, 2], "<s>n</s>"), ([], "")]:
        response = await service.post("/detokenize", {"model": "any", "tokens": tokens})
        assert response.status == 200
        assert await response.json() == {"content": text, "prompt": text}


async def test_detokenize_refuses_invalid_token_ids(service: Service) -> None:
    for tokens, message in [
        ([-1], "`tokens` token ids must be >= 0 and < 1000. Given: -1"),
        ([5, 1000], "`tokens` token ids must be >= 0 and < 1000. Given: 1000"),
        ([5] * 8193, "`tokens` must have at most 8192 tokens. Given: 8193"),
        (["a"], "Expected `int`, got `str` - at `$.tokens[0]`"),
        (None, "Expected `array`, got `null` - at `$.tokens`"),
    ]:
        response = await service.post("/detokenize", {"tokens": tokens})
        assert response.status == 422
        assert (await response.json())["error"] == f"Input validation error: {message}"


async def test_detokenize_replaces_incomplete_characters(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    async def detokenize(token_ids: Sequence[int]) -> TokenizedText:
        return TokenizedText(tuple(token_ids), (b"\xc3", b"\xa9", b"\xf0\x9f"), (False,) * 3)

    monkeypatch.setattr(service.engine, "detokenize", detokenize)
    response = await service.post("/detokenize", {"tokens": [5, 6, 7]})
    assert (await response.json())["content"] == "é\ufffd"


async def test_the_served_description_matches_the_routes(service: Service) -> None:
    assert await (await service.client.get("/openapi.json")).json() == document()


async def test_metrics_count_a_request(service: Service) -> None:
    await service.post("/generate", {"inputs": "ab", "parameters": {"max_new_tokens": 4}})
    response = await service.client.get("/metrics")
    assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    lines = (await response.text()).splitlines()
    for line in (
        "# TYPE tgi_request_count counter",
        'tgi_request_count{model="scripted"} 1',
        'tgi_request_success{model="scripted"} 1',
        'tgi_request_input_length_sum{model="scripted"} 3',
        'tgi_request_generated_tokens_sum{model="scripted"} 4',
        'tgi_request_max_new_tokens_sum{model="scripted"} 4',
        'tgi_request_duration_count{model="scripted"} 1',
        'caravan_time_to_first_token_seconds_count{model="scripted"} 1',
        'caravan_inter_token_latency_seconds_count{model="scripted"} 3',
        'tgi_request_failure{err="dropped",model="scripted"} 0',
    ):
        assert line in lines
    assert any(line.startswith("process_resident_memory_bytes ") for line in lines)


@pytest.mark.parametrize(("given", "kept"), [("abc-1:2", True), ("a b", False), ("a" * 129, False), ("é", False)])
async def test_a_request_id_is_kept_if_it_is_safe_to_log(service: Service, given: str, kept: bool) -> None:
    response = await service.client.get("/health", headers={"X-Request-Id": given})
    assert (response.headers["X-Request-Id"] == given) == kept
    assert len(response.headers["X-Request-Id"]) <= 128


async def test_streams_and_errors_have_a_request_id_too(service: Service) -> None:
    stream = await service.post("/generate_stream", {"inputs": "a", "parameters": {"max_new_tokens": 1}})
    error = await service.client.get("/nope")
    assert len(stream.headers["X-Request-Id"]) == len(error.headers["X-Request-Id"]) == 32


async def test_each_request_is_logged_once(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="caravan.access"):
        await service.client.get("/nope", headers={"X-Request-Id": "me"})
        await service.client.get("/health")
    [record] = [record for record in caplog.records if record.name == "caravan.access"]
    assert record.getMessage().startswith("GET /nope 404 ")
    assert record.__dict__["request_id"] == "me"


async def test_http_requests_are_counted_by_route_and_not_by_what_clients_invent(service: Service) -> None:
    await service.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
    for number in range(3):
        await service.client.delete(f"/v1/requests/{number}")
        await service.client.get(f"/nope/{number}")
        await service.client.request("PROPFIND", "/nope")
    await service.client.get("/v1/completions")
    for probe in ("/health", "/livez", "/metrics"):
        await service.client.get(probe)
    found = [line for line in (await service.metrics.render()).decode().splitlines() if "http_requests_total{" in line]
    assert sorted(found) == [
        'caravan_http_requests_total{handler="/v1/completions",method="POST",status="200"} 1',
        'caravan_http_requests_total{handler="/v1/requests/{id}",method="DELETE",status="404"} 3',
        'caravan_http_requests_total{handler="none",method="GET",status="404"} 3',
        'caravan_http_requests_total{handler="none",method="GET",status="405"} 1',
        'caravan_http_requests_total{handler="none",method="other",status="404"} 3',
    ]


async def test_the_pages_own_requests_are_logged_only_if_they_fail(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    of_page = {PAGE_HEADER: "1"}
    with caplog.at_level(logging.INFO, logger="caravan.access"):
        assert (await service.client.get("/v1/models", headers=of_page)).status == 200
        await service.client.get("/nope", headers=of_page)
        await service.client.get("/page/nope/a/b.js")
        await service.client.post("/tokenize", json={"inputs": "a"}, headers=of_page)
        assert (await service.client.get("/v1/models")).status == 200
    lines = [record.getMessage() for record in caplog.records if record.name == "caravan.access"]
    assert [" ".join(line.split()[:3]) for line in lines] == [
        "GET /nope 404",
        "GET /page/nope/a/b.js 404",
        "POST /tokenize 200",
        "GET /v1/models 200",
    ]


PREFLIGHT = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}


async def test_any_origin_is_allowed_by_default(service: Service) -> None:
    response = await service.client.options("/generate", headers=PREFLIGHT)
    assert response.status == 200
    assert response.headers["Access-Control-Allow-Origin"] == "*"
    assert response.headers["Access-Control-Allow-Methods"] == "GET,POST,DELETE"


@pytest.mark.parametrize(
    ("origin", "allowed"), [("https://a.example", "https://a.example"), ("https://b.example", None)]
)
async def test_only_the_configured_origins_are_allowed(origin: str, allowed: str | None) -> None:
    async with (
        serving(ScriptedEngine(), access=Access(cors_allow_origin=("https://a.example",))) as service,
        ClientSession(service.url) as client,
    ):
        response = await client.get("/health", headers={"Origin": origin})
        assert response.headers.get("Access-Control-Allow-Origin") == allowed
        assert response.headers["Vary"] == "Origin"


@pytest.mark.parametrize("origin", ["https://b.example", "null"])
async def test_pages_of_other_origins_cannot_use_the_model_without_a_preflight(origin: str) -> None:
    """A body without a type, such as a Blob's, is sent without one."""
    access = Access(cors_allow_origin=("https://a.example",))
    async with serving(ScriptedEngine(), access=access) as service:

        async def status(method: str, path: str, headers: dict[str, str]) -> int:
            data = b'{"prompt":"a","max_tokens":1}' if method == "POST" else None
            async with service.client.request(
                method, path, data=data, headers=headers, skip_auto_headers=["Content-Type"]
            ) as response:
                return response.status

        assert await status("POST", "/v1/completions", {"Origin": origin}) == 403
        assert await status("DELETE", "/v1/requests/a", {"Origin": origin}) == 403
        assert await status("GET", "/v1/models", {"Origin": origin}) == 200
        own = service.url.removeprefix("http://")
        same = {"Origin": origin, "Sec-Fetch-Site": "same-origin"}
        for allowed in (
            same,
            {"Origin": "https://a.example"},
            {"Origin": f"https://{own}"},
            {"Origin": service.url},
            {},
        ):
            assert await status("POST", "/v1/completions", allowed) == 200


@pytest.mark.parametrize("path", ["/openapi.json", "/api-doc/openapi.json"])
async def test_the_description_has_two_addresses(service: Service, path: str) -> None:
    assert await (await service.client.get(path)).read() == openapi_document()


async def test_the_description_is_also_a_page(service: Service) -> None:
    response = await service.client.get("/docs")
    assert response.content_type == "text/html"
    page = await response.text()
    document = json.loads(openapi_document())
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert f"</b> <code>{path}</code></h3>" in page
            assert f"data-method={method.upper()} data-path='{path}'" in page
            assert f"<li><a href='#{operation['operationId']}'>" in page
    # It loads nothing from elsewhere, runs its own script alone, and every link within it has a target.
    assert not re.findall(r"<script |src=|@import|url\(", page)
    ids = re.findall(r" id='?([\w.-]+)", page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"href='?#([\w.-]+)", page)) <= set(ids)
    assert "list of (string or integer or list of integer)" in page
    policy = response.headers["Content-Security-Policy"].split("; ")
    assert policy[0] == "default-src 'none'"
    for kind in ("script", "style"):
        (content,) = re.findall(f"<{kind}>(.*?)</{kind}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy


async def test_the_page_of_the_description_is_small(service: Service) -> None:
    async with ClientSession(service.url, auto_decompress=False) as client, client.get("/docs") as response:
        assert response.headers["Content-Encoding"] == "gzip"
        assert len(await response.read()) < 80_000


async def test_the_description_needs_no_key() -> None:
    async with serving(ScriptedEngine(), access=keys("a-key")) as service:
        for path in ("/docs", "/openapi.json", "/api-doc/openapi.json"):
            response = await service.client.get(path)
            assert (response.status, len(await response.read()) > 10_000) == (200, True)


@pytest.fixture
async def browser(service: Service) -> AsyncIterator[ClientSession]:
    """A client that shows what was sent, as it was sent."""
    async with ClientSession(service.url, headers=BROWSER, auto_decompress=False) as client:
        yield client


async def test_browsers_get_the_page_and_others_the_health(service: Service) -> None:
    shown = await service.client.get("/", headers=BROWSER)
    assert (shown.status, shown.content_type) == (200, "text/html")
    assert "<!doctype html>" in await shown.text()
    for accept in ("*/*", "application/json", ""):
        response = await service.client.get("/", headers={"Accept": accept})
        assert (response.status, await response.read()) == (200, b"")
    service.engine.healthy = False
    assert (await service.client.get("/")).status == 503
    # The page tells what is wrong.
    assert (await service.client.get("/", headers=BROWSER)).status == 200


async def test_without_the_page_browsers_get_the_health() -> None:
    async with serving(ScriptedEngine(), access=Access(page=False)) as service:
        response = await service.client.get("/", headers=BROWSER)
        assert (response.status, await response.read()) == (200, b"")
        found = page()
        assert (await service.client.get(f"/page/{found.version}/base/main.js")).status == 404


async def test_the_page_needs_no_key_and_says_that_the_api_does() -> None:
    async with serving(ScriptedEngine(), access=keys("a-key")) as locked, serving(ScriptedEngine()) as unlocked:
        html = await (await locked.client.get("/", headers=BROWSER)).text()
        assert 'data-needs-key="yes"' in html
        for path in _linked(html):
            assert (await locked.client.get(f"/{path}")).status == 200
        assert 'data-needs-key="no"' in await (await unlocked.client.get("/", headers=BROWSER)).text()


async def test_a_browser_keeps_the_files_and_asks_whether_the_page_has_changed(browser: ClientSession) -> None:
    first = await browser.get("/")
    assert (first.headers["Cache-Control"], first.headers["Vary"]) == ("no-cache", "Accept, Accept-Encoding")
    again = await browser.get("/", headers={"If-None-Match": first.headers["ETag"]})
    assert (again.status, await again.read()) == (304, b"")
    assert again.headers["Content-Security-Policy"] == first.headers["Content-Security-Policy"]
    script = await browser.get(f"/page/{page().version}/base/main.js")
    assert "immutable" in script.headers["Cache-Control"]
    for path in ("/page/0000000000000000/base/main.js", f"/page/{page().version}/base/nothing.js"):
        assert (await browser.get(path)).status == 404


async def test_the_policy_allows_files_of_the_page_only(browser: ClientSession) -> None:
    for path in ("/", f"/page/{page().version}/base/main.js"):
        response = await browser.get(path)
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        policy = dict(part.split(" ", 1) for part in response.headers["Content-Security-Policy"].split("; "))
        assert policy.pop("default-src") == "'none'"
        assert {name: policy[name] for name in ("script-src", "style-src", "connect-src")} == dict.fromkeys(
            ("script-src", "style-src", "connect-src"), "'self'"
        )
        assert policy["require-trusted-types-for"] == "'script'"
        assert not re.search(r"unsafe|https?:|\*", str(policy))


async def test_the_whole_page_is_small_on_the_wire(browser: ClientSession) -> None:
    response = await browser.get("/")
    sent = [await response.read()]
    assert response.headers["Content-Encoding"] == "gzip"
    for name in page().files:
        response = await browser.get(f"/page/{page().version}/{name}")
        sent.append(await response.read())
        assert gzip.decompress(sent[-1]) == page().files[name].content
    # The page reads the ranges of sampling parameters from the API's description.
    response = await browser.get("/openapi.json")
    sent.append(await response.read())
    assert sum(map(len, sent)) < MOST_BYTES


async def test_a_client_that_takes_no_gzip_gets_none(service: Service) -> None:
    async with ClientSession(service.url, headers=BROWSER | {"Accept-Encoding": "identity"}) as client:
        response = await client.get(f"/page/{page().version}/base/main.js")
        assert "Content-Encoding" not in response.headers
        assert await response.read() == page().files["base/main.js"].content


async def test_vary_names_the_origin_too() -> None:
    access = Access(cors_allow_origin=("https://a.example",))
    async with serving(ScriptedEngine(), access=access) as service:
        response = await service.client.get("/", headers=BROWSER)
        assert response.headers["Vary"] == "Accept, Accept-Encoding, Origin"


def test_every_file_that_is_linked_or_imported_exists_and_none_is_unused() -> None:
    used = {path.partition("VERSION/")[2] for path in _linked(FILES.joinpath("index.html").read_text())}
    for name in page().files:
        if name.endswith(".js"):
            text = FILES.joinpath(name).read_text()
            folder = name.partition("/")[0]
            for path in re.findall(r'(?:from|^import) "(\.[^"]+)";$', text, re.MULTILINE):
                used.add(path.removeprefix("../") if path.startswith("../") else f"{folder}/{path.removeprefix('./')}")
        if name.endswith(".css"):
            found = re.findall(r"url\('([\w./-]+)'\)", FILES.joinpath(name).read_text())
            used.update(f"{name.partition('/')[0]}/{path}" for path in found)
    assert used == page().files.keys()


def test_no_file_of_ours_loads_from_elsewhere_or_makes_code_or_html_of_text() -> None:
    dangerous = re.compile(
        r"\beval\b|new Function|innerHTML|outerHTML|insertAdjacentHTML|document\.write|srcdoc|setAttribute\(\"style"
    )
    for name in page().files:
        if not name.startswith("vendor/"):
            text = FILES.joinpath(name).read_text().replace("http://www.w3.org/2000/svg", "")
            assert not dangerous.search(text), name
            assert "https://" not in text, name
            assert "http://" not in text, name
    html = FILES.joinpath("index.html").read_text()
    assert not re.search(r"<script[^>]*>[^<]|<script(?![^>]* src=\"page/VERSION/)|\son\w+=|\sstyle=", html)


def test_vendored_files_are_those_of_the_packages() -> None:
    noted = tomllib.loads(FILES.joinpath("vendor/vendored.toml").read_text())
    digests = {about.get("as", f"{name}.js"): about["sha256"] for name, about in noted.items()}
    for about in noted.values():
        digests |= {name: more["sha256"] for name, more in about.get("more", {}).items()}
    assert {f"vendor/{name}" for name in digests} == {name for name in page().files if name.startswith("vendor/")}
    for name, digest in digests.items():
        assert hashlib.sha256(FILES.joinpath(f"vendor/{name}").read_bytes()).hexdigest() == digest
    for name, about in noted.items():
        script = about.get("as", f"{name}.js")
        assert about["version"] in FILES.joinpath(f"vendor/{script}").read_text()
        assert "icense" in FILES.joinpath(f"vendor/{script.removesuffix('.js')}.LICENSE").read_text()


def _linked(html: str) -> list[str]:
    return re.findall(r'(?:href|src)="(page/[^"]+)"', html)


def test_the_page_has_words_for_every_reason_to_wait() -> None:
    queue = FILES.joinpath("watch", "queue.js").read_text()
    assert set(re.findall(r"^  (\w+): \(", queue, re.MULTILINE)) == {reason.value for reason in WaitingReason}
