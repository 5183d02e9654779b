"""Files by URL, from a server that breaks off, into folders that hosts share."""

import hashlib
import http.server
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from caravan_models.cli import pull
from caravan_models.errors import FetchError, FetchProblem
from caravan_models.file_download import download_file, wanted_file
from caravan_models.progress import Progress, ignore_progress
from caravan_models.transfer import Patience

CONTENT = bytes(range(256)) * 2048
SHA256 = hashlib.sha256(CONTENT).hexdigest()
# The first request is for the size.
SIZE = "bytes=0-0"
ALL = f"bytes=0-{len(CONTENT) - 1}"


@dataclass
class Server:
    """Serves CONTENT. ``cut_offs``: replies that end early; ``ranges``: what was asked for."""

    url: str = ""
    cut_offs: int = 0
    has_ranges: bool = True
    has_length: bool = True
    ranges: list[str] = field(default_factory=list)
    # The path and the authorization of each request.
    asked: list[tuple[str, str | None]] = field(default_factory=list)


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = self.headers["Range"]
            state.ranges.append(asked)
            state.asked.append((self.path, self.headers["Authorization"]))
            if self.path.partition("?")[0].endswith("/missing"):
                return self.send_error(404)
            first, last = map(int, asked.removeprefix("bytes=").split("-"))
            body = CONTENT[first : last + 1] if state.has_ranges else CONTENT
            self.send_response(206 if state.has_ranges else 200)
            if state.has_ranges:
                self.send_header("Content-Range", f"bytes {first}-{last}/{len(CONTENT)}")
            if state.has_length:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if state.cut_offs and len(body) > 1:
                state.cut_offs -= 1
                body = body[: len(body) // 2]
            self.wfile.write(body)
            return None

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        state.url = f"http://127.0.0.1:{listening.server_port}/model.gguf"
        threading.Thread(target=listening.serve_forever, args=(0.01,), daemon=True).start()
        yield state
        listening.shutdown()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def fetch(server: Server, path: Path, sha256: str = SHA256) -> list[Progress]:
    told: list[Progress] = []
    download_file(wanted_file(server.url, sha256, str(path)), told.append, Patience(pause_s=0.001, tries=3))
    return told


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "model.gguf"


def test_a_file_is_fetched_once_and_read_once(server: Server, path: Path) -> None:
    told = fetch(server, path)
    assert path.read_bytes() == CONTENT
    assert (told[-1].done, told[-1].size) == (len(CONTENT), len(CONTENT))
    assert fetch(server, path) == []
    assert server.ranges == [SIZE, ALL]


def test_a_download_that_was_cut_off_continues(server: Server, path: Path) -> None:
    server.cut_offs = 1
    fetch(server, path)
    assert path.read_bytes() == CONTENT
    assert server.ranges == [SIZE, ALL, f"bytes={len(CONTENT) // 2}-{len(CONTENT) - 1}"]


@pytest.mark.parametrize("kept", [CONTENT, CONTENT[:100], b"damaged", b""])
def test_the_next_run_continues_with_what_it_has_and_checks_it(server: Server, path: Path, kept: bytes) -> None:
    path.parent.mkdir()
    path.with_name("model.gguf.partial").write_bytes(kept)
    fetch(server, path)
    assert path.read_bytes() == CONTENT
    assert (ALL in server.ranges) == (kept in {b"damaged", b""})


def test_a_server_without_ranges_sends_all(server: Server, path: Path) -> None:
    server.has_ranges = False
    fetch(server, path)
    assert path.read_bytes() == CONTENT


def test_a_server_that_does_not_say_how_large_a_file_is_is_refused(server: Server, path: Path) -> None:
    server.has_ranges = server.has_length = False
    with pytest.raises(FetchError, match="does not say how large"):
        fetch(server, path)


def test_a_file_with_another_digest_is_removed(server: Server, path: Path) -> None:
    with pytest.raises(FetchError, match=f"has the digest {SHA256}, not {'0' * 64}") as refused:
        fetch(server, path, "0" * 64)
    assert refused.value.problem is FetchProblem.WRONG_DIGEST
    assert [left.name for left in path.parent.iterdir()] == [".caravan-pull.lock"]


def test_a_file_that_was_changed_is_checked_again(server: Server, path: Path) -> None:
    fetch(server, path)
    path.write_bytes(b"GGUF, but another one")
    with pytest.raises(FetchError, match="it is removed, try again"):
        fetch(server, path)
    fetch(server, path)
    assert path.read_bytes() == CONTENT


def test_a_file_that_the_server_lacks_is_an_error_at_once(server: Server, path: Path) -> None:
    server.url = server.url.replace("model.gguf", "missing")
    with pytest.raises(FetchError, match="missing answers with status 404"):
        fetch(server, path)
    assert server.ranges == [SIZE]


def test_a_server_that_does_not_listen_is_named(path: Path) -> None:
    with pytest.raises(FetchError, match=r"cannot reach http://127\.0\.0\.1:1/x"):
        download_file(wanted_file("http://127.0.0.1:1/x", SHA256, str(path)), ignore_progress)


def test_an_object_comes_by_a_signed_url_that_no_message_shows(
    server: Server, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The token is for hubs: stores refuse two kinds of credentials.
    given = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "DOWNLOAD_TOKEN": "token"}
    for name, value in (given | {"AWS_ENDPOINT_URL": server.url.rpartition("/")[0]}).items():
        monkeypatch.setenv(name, value)
    download_file(wanted_file("s3://bucket/folder/m.gguf", SHA256, str(path)), ignore_progress)
    assert path.read_bytes() == CONTENT
    for asked, authorization in server.asked:
        assert asked.startswith("/bucket/folder/m.gguf?X-Amz-Algorithm=")
        assert authorization is None
    wanted = wanted_file("s3://bucket/missing", SHA256, str(path.with_name("missing")))
    with pytest.raises(
        FetchError, match=r"^s3://bucket/missing, .* answers with status 404; .* AWS_ACCESS_KEY"
    ) as raised:
        download_file(wanted, ignore_progress)
    assert "X-Amz" not in str(raised.value)


def test_a_blob_comes_by_a_signed_url_that_no_message_shows(
    server: Server, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"AZURE_STORAGE_ACCOUNT": "account", "AZURE_STORAGE_SAS_TOKEN": "sig=secret", "DOWNLOAD_TOKEN": "token"}
    for name, value in (given | {"AZURE_STORAGE_SERVICE_ENDPOINT": server.url.rpartition("/")[0]}).items():
        monkeypatch.setenv(name, value)
    download_file(wanted_file("az://models/m.gguf", SHA256, str(path)), ignore_progress)
    assert path.read_bytes() == CONTENT
    assert {*server.asked} == {("/models/m.gguf?sig=secret", None)}
    wanted = wanted_file("az://models/missing", SHA256, str(path.with_name("missing")))
    with pytest.raises(FetchError, match=r"^az://models/missing, .* answers with status 404; .* AZURE_STO") as raised:
        download_file(wanted, ignore_progress)
    assert "secret" not in str(raised.value)


def test_shards_that_share_a_folder_download_each_file_once(server: Server, path: Path) -> None:
    with ThreadPoolExecutor() as shards:
        list(shards.map(lambda _: fetch(server, path), range(4)))
    assert server.ranges == [SIZE, ALL]


def test_the_command_takes_several_files(server: Server, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = path.with_name("other.gguf")
    assert pull(["--file", server.url, SHA256.upper(), str(path), "--file", server.url, SHA256, str(other)]) == 0
    assert path.read_bytes() == other.read_bytes() == CONTENT
    assert capsys.readouterr().out == f"{path}\n{other}\n"


@pytest.mark.parametrize(
    ("url", "sha256", "problem"),
    [
        ("ftp://x/y", SHA256, "a file comes from a URL of http, https, s3 or az. Given: 'ftp://x/y'"),
        ("http://x/y", "12", "a SHA-256 has 64 hexadecimal digits. Given: '12'"),
    ],
)
def test_wrong_words_are_named(url: str, sha256: str, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert pull(["--file", url, sha256, "path"]) == 1
    assert capsys.readouterr().err == f"caravan pull: error: {problem}\n"
