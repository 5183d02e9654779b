"""Reads answers in a browser while things fail: python -m e2e.clients.page_outages URL SEED.

At a random point of each answer it does one of `KINDS`. What is not for the browser to do, it asks for by a line on
standard output, and goes on at the next line on standard input. The last line has what it saw, as JSON.
"""

import json
import random
import re
import shutil
import sys
from typing import Any

from e2e.clients.page_visit import Visit
from playwright.sync_api import Page, sync_playwright

# What the browser does, and what others do for it.
OWN = ("reload", "switch", "close")
KINDS = (*OWN, "network", "shard", "router", "server")
ANSWERS = 20
# Answers are letters between quotation marks, so that Markdown leaves them as they are.
LETTERS = 100
SCHEMA = {"type": "string", "pattern": f"^[a-z]{{{LETTERS}}}$"}
TEXT = {"format": {"type": "json_schema", "name": "letters", "schema": SCHEMA}}
SETTINGS = json.dumps({"sampling": {"temperature": 0, "text": TEXT}})
RECORDS = """
() => new Promise((resolve) => {
  const opening = indexedDB.open("caravan");
  opening.onsuccess = () => {
    const reading = opening.result.transaction("nodes").objectStore("nodes").getAll();
    reading.onsuccess = () => {
      opening.result.close();
      resolve(reading.result.map(({ kind, items, response, status, error, made }) => ({
        kind, response, status, error, made,
        text: items.flatMap((item) => item.content ?? []).map((part) => part.text ?? "").join(""),
      })).sort((one, other) => one.made - other.made));
    };
  };
})
"""


def main() -> None:
    url, seed = sys.argv[1:]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        visit = Visit(browser, url, "")
        visit.context.add_init_script(f"localStorage.setItem('caravan.settings', {SETTINGS!r})")
        visit.go()
        visit.say("The other conversation.")
        draw = random.Random(int(seed))
        kinds = [KINDS[number % len(KINDS)] for number in range(ANSWERS)]
        found = [_answer(visit, number, kind, draw) for number, kind in enumerate(kinds)]
        forgotten = _forgotten(visit)
        records = visit.page.evaluate(RECORDS)
        # The browser itself tells of requests that failed.
        wrong = [text for text in visit.wrong if "Failed to load resource" not in text]
        print(json.dumps({"answers": found, "forgotten": forgotten, "records": records, "wrong": wrong}))
        browser.close()


def _answer(visit: Visit, number: int, kind: str, draw: random.Random) -> dict[str, Any]:
    """Ask in a new conversation, let something fail, and wait for the end."""
    asked = f"Question {number} of {kind}?"
    visit.button("New conversation").click()
    visit.page.get_by_text("Ask something.").wait_for()
    visit.message().fill(asked)
    # It is stored before it is sent; a page that is closed earlier has it as a draft.
    with visit.page.expect_request("**/v1/responses"):
        visit.button("Send").click()
    # One in three while nothing of the answer is there.
    seen = _read(visit.page, draw.randrange(LETTERS - 10) if number % 3 else 0)
    _fail(visit, kind)
    tries = _end(visit)
    return {
        "kind": kind,
        "seen": seen,
        "asked": visit.page.locator(".entry.message .message-body").all_inner_texts() == [asked],
        "tries": tries,
        "shown": _letters(visit.page),
    }


def _read(page: Page, characters: int) -> str:
    """Wait until this much of an answer is shown, and return what is."""
    if characters:
        page.locator(".entry.answer .answer-body", has_text=re.compile(f"[a-z]{{{characters}}}")).wait_for()
    return _letters(page)


def _letters(page: Page) -> str:
    """Return the letters that are shown of an answer."""
    shown = page.locator(".entry.answer .answer-body").all_text_contents()
    return "".join(filter(str.isalpha, "".join(shown)))


def _fail(visit: Visit, kind: str) -> None:
    if kind == "reload":
        visit.page.reload()
    elif kind == "switch":
        visit.button("The other conversation.").click()
        visit.page.locator("#title", has_text="The other").wait_for()
        visit.page.go_back()
    elif kind == "close":
        address = visit.page.url
        visit.page.close()
        visit.page = visit.context.new_page()
        visit.page.goto(address)
    else:
        print(kind, flush=True)
        assert sys.stdin.readline()
    visit.page.locator(".entry.message").wait_for()


def _end(visit: Visit) -> int:
    """Wait for the end of an answer; ask again for one that did not begin. Returns how often it was asked for."""
    for tries in range(1, 10):
        visit.ended()
        if not visit.button("Try again").count():
            return tries
        visit.button("Try again").click()
    raise AssertionError("no answer after many tries")


def _forgotten(visit: Visit) -> dict[str, Any]:
    """The server loses what it stored: what is there stays and goes on."""
    visit.button("New conversation").click()
    visit.message().fill("Do you forget?")
    visit.button("Send").click()
    # Early, so that the answer has not ended when the server does.
    seen = _read(visit.page, 5)
    _fail(visit, "amnesia")
    visit.button("Continue").wait_for()
    kept = _letters(visit.page)
    visit.button("Continue").click()
    visit.ended()
    went_on = _letters(visit.page)
    visit.say("And now?")
    return {"seen": seen, "kept": kept, "went_on": went_on, "answers": len(visit.answers())}


main()
