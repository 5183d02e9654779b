"""The files of the page, read and compressed once."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable

from caravan_router.http.server.compressed import Compressed

_CONTENT_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# Stand in the HTML for the version, which is part of the paths of all other files, and for "yes" or "no".
_VERSION, _NEEDS_KEY = b"VERSION", b"NEEDS_KEY"


@dataclass(frozen=True, slots=True)
class Page:
    """``document`` and ``locked``: the HTML, without and with API keys. ``files``: all others, by folder and name.

    ``version`` changes with every byte of them, so that a browser may keep them for ever.
    """

    version: str
    document: Compressed
    locked: Compressed
    files: Mapping[str, Compressed]


@cache
def page() -> Page:
    """Read the page. Call before the event loop runs, which file access would block."""
    root = resources.files("caravan_studio.page")
    contents = dict(sorted(_contents(root)))
    digest = hashlib.sha256(root.joinpath("index.html").read_bytes())
    for name, content in contents.items():
        digest.update(name.encode() + b"\0" + content)
    version = digest.hexdigest()[:16]
    html = root.joinpath("index.html").read_bytes().replace(_VERSION, version.encode())
    document, locked = (_file("index.html", html.replace(_NEEDS_KEY, answer)) for answer in (b"no", b"yes"))
    return Page(version, document, locked, {name: _file(name, content) for name, content in contents.items()})


def _contents(root: Traversable) -> Iterator[tuple[str, bytes]]:
    for folder in root.iterdir():
        if folder.is_dir():
            for file in folder.iterdir():
                if _ending(file.name) in _CONTENT_TYPES:
                    yield f"{folder.name}/{file.name}", file.read_bytes()


def _file(name: str, content: bytes) -> Compressed:
    return Compressed.of(content, _CONTENT_TYPES[_ending(name)])


def _ending(name: str) -> str:
    return name.rpartition(".")[2]
