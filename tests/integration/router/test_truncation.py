"""Over-long chats on shards: the prompt is that of the turns that are left."""

from typing import Any

from aiohttp import ClientSession

from caravan_testing.cluster import Cluster, ClusterConfig, cluster


async def ask(session: ClientSession, running: Cluster, path: str, body: dict[str, Any]) -> dict[str, Any]:
    async with session.post(f"{running.url}{path}", json=body) as response:
        assert response.status == 200, await response.text()
        reply: dict[str, Any] = await response.json()
        return reply


async def test_what_is_left_is_answered_as_if_it_were_all() -> None:
    messages = [{"role": "system", "content": "Be short."}]
    for number in range(60):
        messages += [{"role": "user", "content": f"{number} " + "x" * 20}, {"role": "assistant", "content": "a" * 20}]
    messages.append({"role": "user", "content": "Last"})
    greedy = {"temperature": 0, "max_tokens": 12, "return_token_ids": True}
    async with cluster(ClusterConfig(cells=1024)) as running, ClientSession() as session:
        body = {"messages": messages, "truncation": "auto", **greedy}
        told = await ask(session, running, "/v1/chat/completions", body)
        gone = set(told["truncated"]["messages"])
        left = [message for at, message in enumerate(messages) if at not in gone]
        assert left[0] == messages[0]
        assert left[1] == messages[1 + 2 * told["truncated"]["turns"]]
        same = await ask(session, running, "/v1/chat/completions", {"messages": left, **greedy})
        assert told["prompt_token_ids"] == same["prompt_token_ids"]
        assert told["choices"] == same["choices"]
        options = {"temperature": 0, "num_predict": 12}
        body = {"model": "toy", "messages": messages, "stream": False, "options": options}
        answer = await ask(session, running, "/api/chat", body)
        assert answer["prompt_eval_count"] == told["usage"]["prompt_tokens"]
        assert answer["message"]["content"] == told["choices"][0]["message"]["content"]
        await running.wait_until_at_rest()
