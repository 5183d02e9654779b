"""The times that every route reports include the upload of the request body."""

import asyncio
from typing import Any

import msgspec
import pytest

from caravan_testing.http_server import Service

UPLOAD_S = 0.3
# Timers may fire a few milliseconds early.
LEAST_S = 0.9 * UPLOAD_S


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"inputs": "hi"}),
        ("/invocations", {"inputs": "hi"}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/api/generate", {"model": "m", "prompt": "hi", "raw": True, "stream": False}),
        ("/vertex", {"instances": [{"inputs": "hi"}]}),
    ],
)
async def test_times_include_the_upload(service: Service, path: str, body: dict[str, Any]) -> None:
    data = msgspec.json.encode(body)

    async def slowly() -> Any:
        yield data[:5]
        await asyncio.sleep(UPLOAD_S)
        yield data[5:]

    headers = {"Content-Type": "application/json"}
    # The client waits for "100 Continue", so the head has arrived when the upload starts.
    response = await service.client.post(path, data=slowly(), headers=headers, expect100=True)
    assert response.status == 200, await response.text()
    reply = await response.json()
    assert int(response.headers["x-total-time"]) >= LEAST_S * 1000
    assert await service.sample("caravan_time_to_first_token_seconds_sum") >= LEAST_S
    if path.startswith("/api/"):
        assert reply["total_duration"] >= LEAST_S * 1e9
