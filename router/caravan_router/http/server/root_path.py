"""The path under which a proxy serves the router: requests may have it before the paths of routes."""

from collections.abc import Callable
from typing import Any

from aiohttp import web
from yarl import URL

ROOT_PATH = web.AppKey("root_path", str)


def without_root(make_request: Callable[..., web.BaseRequest], root_path: str) -> Callable[..., web.BaseRequest]:
    """Return ``make_request``, aiohttp's for a message that has arrived, for messages with ``root_path``.

    Whatever handles the request, and the log, see the path behind it. A path without it stays as it is, since most
    proxies strip it.
    """

    def make(message: Any, *rest: Any) -> web.BaseRequest:
        if message.path.startswith(f"{root_path}/"):
            path = message.path.removeprefix(root_path)
            message = message._replace(path=path, url=URL.build(path="/", encoded=True).join(URL(path, encoded=True)))
        return make_request(message, *rest)

    return make
