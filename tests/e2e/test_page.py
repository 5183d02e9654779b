"""The page in a browser, driven by what `make test-clients` sets up: playwright, and Debian's Chromium."""

import asyncio
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from caravan_testing.http_server import keys, serving
from caravan_testing.page_engine import CALL, THOUGHT, WRITTEN, PageEngine, write_recording
from caravan_testing.serve_process import ROOT, generate, serve, write_models

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no Chromium: apt-get install chromium"),
]

PYTHON = ROOT / ".cache/clients/page/bin/python"
SCRIPTED = (
    "talk",
    "markdown",
    "branches",
    "side_by_side",
    "hostile",
    "by_keyboard",
    "tools_and_settings",
    "files",
    "pdf",
    "completing",
    "addresses",
    "tabs",
    "columns",
    "failing",
    "looks",
    "theme",
)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What all parts see that need a scripted engine only. They share a browser."""
    recording = write_recording(tmp_path_factory.mktemp("page") / "recording.gz")

    async def visit() -> dict[str, Any]:
        async with serving(PageEngine()) as service:
            return await _seen(service.url, *SCRIPTED, f"recording={recording}")

    return asyncio.run(visit())


async def _seen(url: str, *parts: str) -> dict[str, Any]:
    """Use the page as ``parts`` of the session do; return what they saw."""
    assert PYTHON.exists(), "no environment for the page: run `make test-clients`"
    process = await asyncio.create_subprocess_exec(
        PYTHON,
        *("-m", "e2e.clients.page_session", url, *parts),
        env=os.environ | {"PYTHONPATH": str(ROOT / "tests")},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    found: dict[str, Any] = json.loads(out)
    return found


async def _ask_again_and_again(url: str, number: int) -> None:
    while True:
        await asyncio.to_thread(generate, url, f"{number} sheep", 300)


def told(found: dict[str, Any], part: str) -> dict[str, Any]:
    """Return what ``part`` saw, which must be whole and without errors, foreign requests and breaches of the policy."""
    facts: dict[str, Any] = found[part]
    assert "failed" not in facts, facts["failed"]
    assert facts["wrong"] == []
    return {name: fact for name, fact in facts.items() if name != "wrong"}


def test_answers_stream_stop_go_on_and_are_kept(words: dict[str, Any]) -> None:
    got = told(words, "talk")
    assert got["streaming"] == {"stop": True, "busy": 1}
    assert (got["stopped"], got["continued"]) == (["one two three"], ["one two three four five"])
    assert got["rich"] == {
        "heading": "Rivers",
        "code": 'print("hello")',
        "cells": ["Elbe", "1094"],
        "link": "noopener noreferrer nofollow",
    }
    assert got["folded"]
    assert THOUGHT in got["thought"]
    assert re.search(r"\d+ tokens .*\d+ of \d+ prompt tokens cached", got["cost"])
    assert (got["kept"], got["title"]) == (3, "wait")


def test_markdown_and_formulas_are_shown_as_written_and_copied(words: dict[str, Any]) -> None:
    got = told(words, "markdown")
    assert (got["starts"], got["checks"], got["inputs"], got["right"]) == ([1, 5], [1, 1], 0, "right")
    assert got["cells"] == ["a<br>b", "H<sub>2</sub>O"]
    assert got["folded"] == "More"
    assert len(got["formulas"]) == 4
    assert got["coloured"] == ["def", "return"]
    assert "Costs $5, not $6." in got["text"]
    assert "<b onclick=x>raw" in got["text"]
    assert got["links"] == [""]
    # Browsers have no other clipboard over plain HTTP.
    assert got["copied"] == ['def f(x):\n    return "text"  # why', WRITTEN]
    assert got["announced"] == "Copied"
    assert got["mangled"] == []


def test_conversations_fork_rewind_and_are_edited(words: dict[str, Any]) -> None:
    got = told(words, "branches")
    assert got["forked"] == ["You said first.", "You said third."]
    # Two beginnings have an end each, and one of them has two answers.
    assert [text.split("\n")[0].split(" ")[0] for text in got["nodes"]].count("You") == 3
    assert all("cached" in text for text in got["nodes"] if text.startswith("Answer"))
    assert got["back"] == ["You said first.", "You said second."]
    assert got["question"] == "Go back to here?"
    assert got["rewound"] == ["You said first."]
    assert got["anew"] == ["You said fourth."]
    assert got["changed"] == ["Something else."]
    assert (got["left"], got["undone"]) == (0, ["first"])


def test_one_of_several_answers_is_chosen(words: dict[str, Any]) -> None:
    got = told(words, "side_by_side")
    assert got["shown"] == ["You said choose."] * 3
    assert got["blocked"]
    assert got["answers"] == ["You said choose.", "You said more."]


def test_hostile_texts_run_nothing_and_break_no_layout(words: dict[str, Any]) -> None:
    got = told(words, "hostile")
    assert (got["ran"], got["made"], got["wide"]) == (None, 0, False)
    assert {protocol for protocol, _ in got["links"]} <= {"https:", ":"}
    assert all(rel == "noopener noreferrer nofollow" for _, rel in got["links"])
    assert got["first"] == 100_000
    assert got["whole"] == 1_000_000


def test_everything_can_be_done_by_keyboard(words: dict[str, Any]) -> None:
    got = told(words, "by_keyboard")
    assert got == {"began": "Message", "outline": "solid", "opened": True, "closed": True, "back": "Settings"}


def test_settings_have_the_ranges_of_the_api_and_tools_are_answered(words: dict[str, Any]) -> None:
    got = told(words, "tools_and_settings")
    assert got["limits"] == ["0", "100"]
    assert got["refused"]
    assert got["body"] == {"temperature": 0.5, "instructions": "Be brief.", "stream": True}
    assert json.loads(got["call"]) == CALL["arguments"]
    assert "You said weather." in got["answers"][-1]


def test_files_become_parts_of_the_message_or_are_refused_by_name(words: dict[str, Any]) -> None:
    got = told(words, "files")
    assert got["refused"] == [
        "a.png was not added: the model reads no images.",
        "b.zip was not added: it is no text, PDF, image or audio file.",
    ]
    assert got["attached"] == ["notes.md\n11 B", "dropped.txt\n16 B"]
    assert got["parts"] == [
        '<file name="notes.md">\n# Größe\n</file>\n\n',
        '<file name="dropped.txt">\nfrom the desktop\n</file>\n\n',
        '<file name="c.pdf">\nInvoice\n\nThe total is 1,234.50 €.\n</file>\n\n',
        "What is this?",
    ]
    assert [text.split("\n")[0] for text in got["folded"]] == ["notes.md", "dropped.txt", "c.pdf"]
    # The server refused the message, which stays where it is.
    assert (got["url"], got["width"], got["kept"]) == ("data:image/jpeg;base64,", 1536, True)
    # In base64, "RIFF" begins so.
    assert got["sound"] == ["input_audio", "wav", "UklGR"]


def test_texts_of_pdf_files_are_read_in_the_browser(words: dict[str, Any]) -> None:
    got = told(words, "pdf")
    assert got["plain"] == got["packed"] == got["damaged"] == "Hello wörld\nA (b)"
    assert got["encrypted"] == "Error: it is encrypted"
    assert got["other"] == "Error: it is no PDF file"
    assert got["unknown"] == "Error: its texts are packed by LZWDecode"


def test_tokens_tell_how_likely_they_were(words: dict[str, Any]) -> None:
    got = told(words, "completing")
    assert '" said"' in got["told"]
    assert '"maybe"' in got["told"]
    assert got["moved"] != got["told"]
    assert got["prompt"].startswith("OnceYou said")
    assert "".join(got["tokens"]) == "You said **likely**."


def test_conversations_have_addresses_and_names_are_found_and_come_back_from_files(words: dict[str, Any]) -> None:
    got = told(words, "addresses")
    assert (got["own"], got["title"], got["back"]) == (3, "second · Caravan", True)
    assert got["found"] == ["Renamed"]
    assert got["markdown"].startswith("# likely\n\n## You\n\nlikely\n")
    assert "You said **likely**." in got["markdown"]
    assert got["refused"].startswith("This file has no conversations")
    assert got["titles"] == ["Renamed", "likely"]


def test_tabs_lose_nothing_of_each_other(words: dict[str, Any]) -> None:
    got = told(words, "tabs")
    assert got["followed"] == ["You said one.", "You said two."]
    assert (got["stopped"], got["nodes"]) == (["one two three"], 8)
    assert got["meanwhile"] == ["one", "You said **one**.", "two", "You said **two**."]


def test_answers_side_by_side_have_their_own_sampling(words: dict[str, Any]) -> None:
    got = told(words, "columns")
    own = [{"temperature": 0, "seed": None}, {"temperature": 1.5, "seed": 7}]
    # The third of them continues the second one.
    assert got["sent"] == [*own, *own, own[1]]
    assert got["headings"] == ["Answer 1 of 2 · temperature 0", "Answer 2 of 2 · temperature 1.5 · seed 7"]
    assert (got["unreadable"], got["answers"]) == ([], ["You said choose."])


def test_what_fails_stays_and_what_the_server_forgot_is_sent_again(words: dict[str, Any]) -> None:
    got = told(words, "failing")
    assert (got["draft"], got["covers"], got["notices"]) == ("a draft", False, 0)
    assert got["could_send"] == "false", "no conversation had been read"
    assert got["continued"] == "resp_"
    assert got["resent"] == [[1, True], [5, False]]
    assert re.fullmatch(r"\d+ of 100,000 tokens", got["meter"])
    assert got["checked"]
    # A response whose reply was lost is found again, and not generated twice.
    assert got["same"]
    said = ("keep me", "next", "after a restart", "too long", "lost")
    assert got["answers"] == [f"You said {text}." for text in said]


async def test_with_api_keys_only_the_field_for_a_key_is_shown() -> None:
    async with serving(PageEngine(), access=keys("alice", "bob")) as service:
        got = told(await _seen(service.url, "locked"), "locked")
    assert (got["app"], got["unreadable"]) == (False, [])
    assert "API key" in got["screen"]
    assert "Conversations" not in got["screen"]
    # The key is in the session's storage alone, and the conversations of one key are not those of another.
    assert got["kept"] == [False, True]
    assert (got["hidden"], got["others"]) == (0, 0)


def test_both_themes_and_widths_are_readable(words: dict[str, Any]) -> None:
    got = told(words, "looks")
    assert got["unreadable"] == []
    assert got["wide"] == []
    assert got["grounds"] == {"light": "rgb(251, 250, 248)", "dark": "rgb(22, 24, 27)"}
    assert got["covers"] == [375, 375, 375]
    # A phone's space belongs to the text, even with a file attached.
    assert got["share"] > 0.7


def test_the_chosen_theme_is_remembered(words: dict[str, Any]) -> None:
    light, dark = "rgb(251, 250, 248)", "rgb(22, 24, 27)"
    assert told(words, "theme")["grounds"] == [dark, light, dark, dark]


def test_a_recording_is_opened_and_moved_through(words: dict[str, Any]) -> None:
    got = told(words, "recording")
    assert got["before"] == ""
    assert "#1 computes its beginning now" in got["waiting"]
    assert "812 tokens · for 2.0 s · key-1" in got["waiting"]
    assert "300 of 1,000 cells used, 100 kept for later prompts" in got["cells"]
    assert "500 B of 1.0 kB in memory" in got["cells"]
    assert "250 ms\n99 %: 1.5 s" in got["figures"]
    assert got["slider"] == "103"
    assert "36 messages lost on the way" in got["told"]
    assert "ended before the router: its space was full" in got["told"]
    assert got["step"].startswith("a: decode · 5 steps in 240 ms")
    assert "3 of 4 draft tokens taken" in got["step"]
    assert (got["drawn"], got["unreadable"], got["wide"]) == (True, [], False)
    assert got["plays"] == "Pause"
    assert "recording" not in got["live"]


async def test_the_steps_of_a_server_are_shown_as_they_happen() -> None:
    flags = ("--backend", "fake", "--fake-token-ms", "20", "--shards", "2", "-np", "1", "-c", "2048")
    with serve(*flags) as server:
        asking = [asyncio.create_task(_ask_again_and_again(server.url, number)) for number in range(6)]
        got = told(await _seen(server.url, "live"), "live")
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)
    reasons = "no shard has a free place|no shard has enough free cells|others go first|the shards are in a step"
    assert re.search(reasons, got["waiting"])
    assert got["still"]
    assert got["lanes"].startswith("Steps of 2 shards")


async def test_operators_see_the_fleet_and_are_asked_before_they_change_it() -> None:
    flags = ("--backend", "fake", "--shards", "2", "-np", "4", "-c", "4096", "--shard-grace-s", "60")
    with serve(*flags) as server:
        got = told(await _seen(server.url, "fleet"), "fleet")
    assert (got["rows"], got["unreadable"], got["wide"]) == (2, [], False)
    assert got["names"] == ["shard-0", "shard-1"]
    assert got["question"].startswith("Flush shard-")
    assert got["kept"] == 2


async def test_operators_load_and_unload_models(tmp_path: Path) -> None:
    flags = ("--models-file", str(write_models(tmp_path, "a", "b")), "--backend", "fake")
    with serve(*flags, models=()) as server:
        got = told(await _seen(server.url, "models"), "models")
    load, unload = got["questions"]
    assert load.startswith("Load a?")
    assert unload.startswith("Unload a?")
