"""What helm asks a cluster before it renders and applies a chart, answered from a few tables."""

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def api_server(objects: list[dict[str, Any]], running: dict[str, int]) -> Iterator[str]:
    """Know the kinds of ``objects``, and StatefulSets of the release `caravan` with so many replicas; yield the URL."""
    pages = _discovery({(found["apiVersion"], found["kind"]) for found in objects})
    for name, replicas in running.items():
        pages[f"/apis/apps/v1/namespaces/caravan/statefulsets/{name}"] = {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "metadata": {
                "name": name,
                "namespace": "caravan",
                "labels": {"app.kubernetes.io/managed-by": "Helm"},
                "annotations": {
                    "meta.helm.sh/release-name": "caravan",
                    "meta.helm.sh/release-namespace": "caravan",
                },
            },
            "spec": {"replicas": replicas},
        }
    missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = pages.get(self.path.partition("?")[0], missing)
            body = json.dumps(page).encode()
            self.send_response(page.get("code", 200))
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()


def _discovery(kinds: set[tuple[str, str]]) -> dict[str, dict[str, Any]]:
    """Return the pages by which clients learn what kinds there are, by their paths."""
    pages: dict[str, dict[str, Any]] = {
        "/version": {"major": "1", "minor": "34", "gitVersion": "v1.34.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "groups": []},
    }
    for version in {version for version, _ in kinds}:
        group, _, number = version.rpartition("/")
        resources = [
            {"kind": kind, "name": f"{kind.lower()}s", "singularName": "", "namespaced": True, "verbs": ["get"]}
            for own, kind in kinds
            if own == version
        ]
        path = f"/apis/{version}" if group else f"/api/{version}"
        pages[path] = {"kind": "APIResourceList", "groupVersion": version, "resources": resources}
        if group:
            served = {"groupVersion": version, "version": number}
            pages["/apis"]["groups"].append({"name": group, "versions": [served], "preferredVersion": served})
    return pages
