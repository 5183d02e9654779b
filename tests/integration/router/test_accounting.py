"""The usage of API keys equals the sum of what their replies say, and budgets refuse in each dialect's form."""

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import ClientSession
from openai import AsyncOpenAI, RateLimitError
from openai.types.admin.organization.usage_completions_response import DataResultOrganizationUsageCompletionsResult

from caravan_dialects.auth.key import ApiKey, digest_of
from caravan_dialects.auth.usage import DAY_S
from caravan_router.auth.keyring import Keyring
from caravan_router.http.app import Access
from caravan_scheduler.core.generation import Tenant
from caravan_testing.cluster import Cluster, ClusterConfig, cluster

DAY = {"tokens_per_day": 40}


def key(name: str, **limits: Any) -> ApiKey:
    return ApiKey(digest=digest_of(name), tenant=Tenant(name=name), **limits)


def access(*keys: ApiKey) -> Access:
    return Access(keyring=Keyring(keys, time.monotonic()))


CONFIG = ClusterConfig(
    access=access(key("alice"), key("bob"), key("op", operator=True), key("poor", tokens_per_day=20)),
    embedding_size=8,
    chat_template="{% for message in messages %}{{ message.content }}{% endfor %}",
)


class Caller:
    """Asks as the holder of a key, and sums what the replies say."""

    def __init__(self, session: ClientSession, running: Cluster, name: str) -> None:
        self.session = session
        self.url = running.url
        self.headers = {"Authorization": f"Bearer {name}"}
        self.prompt = self.output = self.cached = 0

    async def post(self, path: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
        async with self.session.post(self.url + path, json=body, headers=self.headers | headers) as response:
            reply: dict[str, Any] = await response.json()
            assert response.status == 200, reply
        usage = reply.get("usage", {})
        self.prompt += usage.get("prompt_tokens", 0)
        self.output += usage.get("completion_tokens", 0)
        self.cached += usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        return reply

    async def used(self, query: str = "", kind: str = "completions") -> tuple[int, list[dict[str, Any]]]:
        """Return the status, and the results of today."""
        url = f"{self.url}/v1/organization/usage/{kind}?{query}"
        async with self.session.get(url, headers=self.headers) as response:
            reply = await response.json()
            if response.status != 200:
                return response.status, [reply]
            *before, today = reply["data"]
            assert not any(bucket["results"] for bucket in before)
            assert today["start_time"] == time.time() // DAY_S * DAY_S
            return 200, today["results"]


def completion(prompt: str | list[str], tokens: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, **fields}


async def test_usage_is_the_sum_of_the_usage_of_replies() -> None:
    async with cluster(CONFIG) as running, ClientSession() as session:
        alice, bob, op = (Caller(session, running, name) for name in ("alice", "bob", "op"))
        await asyncio.gather(
            alice.post("/v1/completions", completion("one two three", 5)),
            alice.post("/v1/completions", completion("shared by four", 3, n=4, temperature=1, seed=1)),
            alice.post("/v1/completions", completion(["first", "second one"], 4, n=2, temperature=1, seed=1)),
            bob.post("/v1/completions", completion("of bob", 7), **{"X-Session-Id": "a session with a long name"}),
        )
        await alice.post("/v1/completions", completion("one two three", 2))
        assert alice.cached > 0
        _, [of_alice] = await alice.used("group_by=api_key_id")
        assert (of_alice["input_tokens"], of_alice["output_tokens"]) == (alice.prompt, alice.output)
        assert of_alice["input_cached_tokens"] >= alice.cached
        assert (of_alice["api_key_id"], of_alice["model"]) == ("alice", None)
        # Each prompt is a request.
        assert of_alice["num_model_requests"] == 5
        _, of_all = await op.used("group_by[]=api_key_id&group_by[]=session&group_by[]=model")
        assert [(one["api_key_id"], one["session"], one["model"]) for one in of_all] == [
            ("alice", "", "toy"),
            ("bob", "a se…g name", "toy"),
        ]
        _, [both] = await op.used()
        assert both["output_tokens"] == alice.output + bob.output
        _, [only] = await op.used("api_key_ids=bob&models=toy")
        assert only["output_tokens"] == bob.output
        assert (await alice.used("api_key_ids=bob"))[0] == 403
        for wrong in ("bucket_width=1h", "group_by=project_id", "project_ids=a", "limit=32", "start_time=-1"):
            assert (await op.used(wrong))[0] == 400, wrong
        assert (await op.used("limit=31"))[0] == 200


async def test_openais_package_reads_usage_by_pages_and_knows_an_exceeded_budget() -> None:
    now = int(time.time())
    async with (
        cluster(CONFIG) as running,
        ClientSession() as session,
        AsyncOpenAI(base_url=f"{running.url}/v1", api_key="poor", admin_api_key="op") as client,
    ):
        await Caller(session, running, "poor").post("/v1/completions", completion("p", 30))
        usage = client.admin.organization.usage
        page = await usage.completions(
            start_time=now - 3 * DAY_S, group_by=["api_key_id", "model"], api_key_ids=["poor"], limit=3
        )
        assert (len(page.data), page.has_more) == (3, True)
        assert page.next_page is not None
        page = await usage.completions(
            start_time=now - 3 * DAY_S, group_by=["api_key_id", "model"], limit=3, page=page.next_page
        )
        assert (len(page.data), page.has_more, page.next_page) == (1, False, None)
        [found] = page.data[0].results
        assert isinstance(found, DataResultOrganizationUsageCompletionsResult)
        assert (found.output_tokens, found.api_key_id, found.model) == (30, "poor", "toy")
        with pytest.raises(RateLimitError) as caught:
            await client.completions.create(model="toy", prompt="p")
        assert (caught.value.code, caught.value.type) == ("insufficient_quota", "insufficient_quota")


async def test_texts_that_are_embedded_count_apart() -> None:
    async with cluster(CONFIG) as running, ClientSession() as session:
        alice = Caller(session, running, "alice")
        reply = await alice.post("/v1/embeddings", {"input": ["one", "two words"]})
        _, [found] = await alice.used("group_by=model", "embeddings")
        assert (found["input_tokens"], found["model"]) == (reply["usage"]["prompt_tokens"], "toy")
        assert (await alice.used())[1] == []


MESSAGES = [{"role": "user", "content": "hi"}]
REFUSED = [
    ("/v1/chat/completions", {"messages": MESSAGES}, 429, ("error", "code"), "insufficient_quota"),
    ("/v1/embeddings", {"input": "a"}, 429, ("error", "type"), "insufficient_quota"),
    ("/v1/messages", {"model": "toy", "messages": MESSAGES, "max_tokens": 1}, 402, ("error", "type"), "billing_error"),
    ("/generate", {"inputs": "a"}, 429, ("error_type",), "insufficient_quota"),
    ("/api/chat", {"model": "toy", "messages": MESSAGES, "stream": False}, 429, ("error_type",), "insufficient_quota"),
    (
        "/v1beta/models/toy:generateContent",
        {"contents": [{"parts": [{"text": "a"}]}]},
        429,
        ("error", "status"),
        "RESOURCE_EXHAUSTED",
    ),
]


async def test_a_key_that_has_used_its_tokens_is_refused_in_each_dialect() -> None:
    async with cluster(CONFIG) as running, ClientSession() as session:
        poor = Caller(session, running, "poor")
        # What runs goes on beyond the budget.
        await poor.post("/v1/completions", completion("p", 30))
        for path, body, status, where, word in REFUSED:
            async with session.post(running.url + path, json=body, headers=poor.headers) as response:
                reply = await response.json()
                assert response.status == status, (path, reply)
                assert response.headers["X-Should-Retry"] == "false"
                assert 0 < int(response.headers["Retry-After"]) <= DAY_S
            assert "You exceeded your current quota: this API key may use 20 tokens per day" in str(reply)
            for name in where:
                reply = reply[name]
            assert reply == word
        # The others go on, and so does what costs no tokens.
        await Caller(session, running, "alice").post("/v1/completions", completion("p", 1))


@pytest.mark.parametrize("shards", [2])
async def test_work_that_is_done_again_is_recomputed_and_output_counts_once(shards: int) -> None:
    config = replace(CONFIG, shards=shards, step_s=0.002)
    async with cluster(config) as running, ClientSession() as session:
        alice = Caller(session, running, "alice")
        asked = asyncio.create_task(alice.post("/v1/completions", completion("one two three", 400)))
        await running.wait_until_all_have(10, 1)
        [busy] = [name for name, shard in running.engine.scheduler.shards.items() if shard.stays.residents]
        await running.stop_shard(busy)
        await asked
        _, [found] = await alice.used()
        assert (found["input_tokens"], found["output_tokens"]) == (alice.prompt, alice.output)
        assert found["recomputed_tokens"] > 10
