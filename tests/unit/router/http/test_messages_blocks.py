"""Blocks that Claude Code and others send beside texts, calls and results, and tools that are not functions."""

import logging
from typing import Any

import pytest

from caravan_testing.http_server import Service, named_events
from caravan_testing.scripted_engine import WordEngine, prompt_text

HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
WEATHER = {"name": "weather", "description": "d", "input_schema": {"type": "object"}}
CLOCK = {"name": "clock", "description": "d", "input_schema": {"type": "object"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}


@pytest.fixture
def engine() -> WordEngine:
    return WordEngine()


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


async def ask(service: Service, messages: list[dict[str, Any]], **body: Any) -> dict[str, Any]:
    reply: dict[str, Any] = await service.reply("/v1/messages", {"messages": messages, "max_tokens": 3} | body)
    return reply


async def shown(service: Service, messages: list[dict[str, Any]], **body: Any) -> str:
    """Return the prompt, without the tag that begins the answer."""
    await ask(service, messages, **body)
    return prompt_text(service.engine).removesuffix("[assistant]")


READ = [
    ({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Body"}}, "Body"),
    (
        {
            "type": "document",
            "title": "Title",
            "context": "About",
            "citations": {"enabled": True},
            "source": {"type": "content", "content": [text("A"), text("B")]},
        },
        "Title\nAbout\nA\nB",
    ),
    ({"type": "document", "source": {"type": "content", "content": "C"}}, "C"),
    (
        {"type": "search_result", "source": "https://a.b", "title": "Title", "content": [text("A"), text("B")]},
        "Title\nhttps://a.b\nA\nB",
    ),
    ({"type": "search_result", "source": "s", "content": []}, "s"),
    ({"type": "tool_reference", "tool_name": "weather"}, "weather"),
]


@pytest.mark.parametrize(("block", "expected"), READ)
async def test_blocks_that_are_read(service: Service, block: dict[str, Any], expected: str) -> None:
    turn = [{"role": "user", "content": [text("See"), block]}]
    assert await shown(service, turn) == f"[user]See\n{expected}</s>"
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text("See"), block]}
    call = {"type": "tool_use", "id": "t", "name": "weather", "input": {}}
    turns = [*HI, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    assert (await shown(service, turns)).endswith(f"[tool]See\n{expected}</s>")


REFUSED = [
    ({"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}}, "document"),
    ({"type": "document", "source": {"type": "url", "url": "https://a.b"}}, "document"),
    ({"type": "document"}, "document"),
    ({"type": "tool_reference"}, "`messages[0].content[0].tool_name` is missing"),
    ({"type": "container_upload", "file_id": "f"}, "container_upload"),
    ({"type": "search_result", "source": "s", "content": [{"type": "image"}]}, "messages[0].content[0].content[0]"),
]


@pytest.mark.parametrize(("block", "message"), REFUSED)
async def test_blocks_that_nobody_can_read(service: Service, block: dict[str, Any], message: str) -> None:
    body = {"messages": [{"role": "user", "content": [block]}], "max_tokens": 3}
    response = await service.post("/v1/messages", body)
    assert response.status == 400
    assert message in (await response.json())["error"]["message"]


async def test_a_file_in_a_result_is_shown_as_a_word(service: Service) -> None:
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [pdf]}
    assert "[tool][document]</s>" in await shown(service, [*HI, {"role": "user", "content": [result]}])


async def test_a_failed_tool_says_so(service: Service) -> None:
    for content, expected in (
        ("No city", "Error: No city"),
        ([text("A"), text("B")], "Error: A\nB"),
        (None, "Error: "),
    ):
        result = {"type": "tool_result", "tool_use_id": "t", "is_error": True, "content": content}
        assert f"[tool]{expected}</s>" in await shown(service, [*HI, {"role": "user", "content": [result]}])


async def test_a_compaction_stands_for_all_before_it(service: Service) -> None:
    summary = {"type": "compaction", "content": "They said hi."}
    turns: list[dict[str, Any]] = [
        *HI,
        {"role": "assistant", "content": [text("Long story."), summary, text("On.")]},
        {"role": "user", "content": "And?"},
    ]
    assert await shown(service, turns) == "[user]They said hi.</s>[assistant]On.</s>[user]And?</s>"
    turns[1] = {"role": "assistant", "content": [summary]}
    assert await shown(service, turns) == "[user]They said hi.\n\nAnd?</s>"
    # One that has failed stands for nothing.
    turns[1] = {"role": "assistant", "content": [text("A"), {"type": "compaction", "content": None}]}
    assert await shown(service, turns) == "[user]hi</s>[assistant]A</s>[user]And?</s>"


async def test_what_hosted_tools_have_left_are_calls_and_results(service: Service) -> None:
    found = [{"type": "web_search_result", "title": "T", "url": "https://a.b", "encrypted_content": "E" * 50}]
    turn = {
        "role": "assistant",
        "content": [
            text("I search."),
            {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "q"}},
            {"type": "web_search_tool_result", "tool_use_id": "s1", "content": found},
            {"type": "server_tool_use", "id": "s2", "name": "code_execution", "input": {}},
            {
                "type": "code_execution_tool_result",
                "tool_use_id": "s2",
                "content": {"type": "code_execution_result", "stdout": "7", "encrypted_stdout": "E" * 50},
            },
            {"type": "mcp_tool_use", "id": "m", "name": "ask", "server_name": "x", "input": {}},
            {"type": "mcp_tool_result", "tool_use_id": "m", "is_error": True, "content": [text("No")]},
            text("Seven."),
        ],
    }
    prompt = await shown(service, [*HI, turn, {"role": "user", "content": "And?"}])
    assert prompt == (
        "[user]hi</s>[assistant]I search.<tool_call>web_search</tool_call></s>[tool]T\nhttps://a.b</s>"
        '[assistant]<tool_call>code_execution</tool_call></s>[tool]{"type":"code_execution_result","stdout":"7"}</s>'
        "[assistant]<tool_call>ask</tool_call></s>[tool]Error: No</s>[assistant]Seven.</s>[user]And?</s>"
    )


def change(kind: str, **tool: Any) -> dict[str, Any]:
    return {"role": "system", "content": [{"type": kind, "tool": tool}]}


CHANGES: list[tuple[list[dict[str, Any]], set[str]]] = [
    ([], {"weather"}),
    ([change("tool_addition", type="tool_definition", definition=CLOCK)], {"weather", "clock"}),
    ([change("tool_removal", type="tool_reference", name="weather")], set()),
    (
        [
            change("tool_removal", type="tool_reference", name="weather"),
            change("tool_addition", type="tool_definition", definition=CLOCK),
            change("tool_addition", type="tool_reference", name="weather"),
            change("tool_removal", type="tool_reference", name="clock"),
        ],
        {"weather"},
    ),
    ([change("tool_addition", type="tool_reference", name="unknown")], {"weather"}),
    ([change("tool_addition", type="tool_definition", definition=SEARCH)], {"weather"}),
]


@pytest.mark.parametrize(("changes", "offered"), CHANGES)
async def test_tools_are_added_and_removed(service: Service, changes: list[dict[str, Any]], offered: set[str]) -> None:
    for name in ("weather", "clock", "web_search", "unknown"):
        choice = {"type": "tool", "name": name}
        body = {"messages": [*HI, *changes], "max_tokens": 3, "tools": [WEATHER], "tool_choice": choice}
        response = await service.post("/v1/messages", body)
        assert response.status == (200 if name in offered else 400), (name, await response.text())
    assert "tool_" not in await shown(service, [*HI, *changes], tools=[WEATHER])


async def test_a_hosted_tool_is_not_demanded(service: Service) -> None:
    for tools in ([SEARCH], [SEARCH, WEATHER]):
        await shown(service, HI, tools=tools, tool_choice={"type": "tool", "name": "web_search"})
        assert service.engine.streams[-1].spec.constraint is None


async def test_hosted_tools_are_left_out_and_logged(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    plain = await shown(service, HI, tools=[WEATHER])
    kinds = ["web_search_20250305", "web_fetch_20250910", "code_execution_20250825", "tool_search_tool_bm25_20251119"]
    hosted = [{"type": kind, "name": kind} for kind in kinds] + [{"type": "mcp_toolset", "mcp_server_name": "x"}]
    with caplog.at_level(logging.INFO, "caravan_router.http.server.ignored"):
        for _ in range(2):
            assert await shown(service, HI, tools=[*hosted, WEATHER]) == plain
    logged = [said for record in caplog.records if "tools of" in (said := record.getMessage())]
    assert sorted(logged) == [f"ignored '{kind}' in tools of /v1/messages" for kind in sorted([*kinds, "mcp_toolset"])]
    assert await shown(service, HI, tools=[SEARCH], tool_choice={"type": "auto"}) == await shown(service, HI)
    response = await service.post(
        "/v1/messages", {"messages": HI, "max_tokens": 3, "tools": [SEARCH], "tool_choice": {"type": "any"}}
    )
    assert response.status == 400
    assert "`tool_choice` may be set only when `tools` has functions" in await response.text()


async def test_edits_of_the_context_are_not_made_and_the_reply_says_so(service: Service) -> None:
    edits = {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}
    assert (await ask(service, HI, **edits))["context_management"] == {"applied_edits": []}
    assert "context_management" not in await ask(service, HI)
    body = {"messages": HI, "max_tokens": 3, "stream": True}
    response = await service.post("/v1/messages", body | edits)
    [last] = [event for event in named_events(await response.text()) if event["type"] == "message_delta"]
    assert last["context_management"] == {"applied_edits": []}
    counted = await service.reply("/v1/messages/count_tokens", {"messages": HI} | edits)
    assert counted["context_management"] == {"original_input_tokens": counted["input_tokens"]}


async def test_texts_of_a_message_are_lines_and_messages_are_paragraphs(service: Service) -> None:
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": [text("A"), text(""), text("B")]},
        {"role": "user", "content": "C"},
        {"role": "assistant", "content": [text("D"), text("E")]},
        {"role": "user", "content": "F"},
    ]
    assert await shown(service, turns) == "[user]A\nB\n\nC</s>[assistant]D\nE</s>[user]F</s>"
