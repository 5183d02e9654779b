"""The page at `/`: who gets it, what its files are, and what they may do."""

import gzip
import hashlib
import re
import tomllib
from collections.abc import AsyncIterator
from importlib import resources

import pytest
from aiohttp import ClientSession

from caravan_router.http.app import Access
from caravan_router.http.page import page
from caravan_scheduler.planning.waiting_reason import WaitingReason
from caravan_testing.http_server import Service, keys, serving
from caravan_testing.scripted_engine import ScriptedEngine

BROWSER = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
FILES = resources.files("caravan_studio.page")
MOST_BYTES = 150_000


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
    assert not re.search(r"<script(?! type=\"module\" src=)|\son\w+=|\sstyle=", html)


def test_vendored_files_are_those_of_the_packages() -> None:
    noted = tomllib.loads(FILES.joinpath("vendor/vendored.toml").read_text())
    assert {f"vendor/{name}.js" for name in noted} == {name for name in page().files if name.startswith("vendor/")}
    for name, package in noted.items():
        content = FILES.joinpath(f"vendor/{name}.js").read_bytes()
        assert hashlib.sha256(content).hexdigest() == package["sha256"]
        assert package["version"] in content.decode()
        assert "icense" in FILES.joinpath(f"vendor/{name}.LICENSE").read_text()


def _linked(html: str) -> list[str]:
    return re.findall(r'(?:href|src)="(page/[^"]+)"', html)


def test_the_page_has_words_for_every_reason_to_wait() -> None:
    queue = FILES.joinpath("watch", "queue.js").read_text()
    assert set(re.findall(r"^  (\w+): \(", queue, re.MULTILINE)) == {reason.value for reason in WaitingReason}
