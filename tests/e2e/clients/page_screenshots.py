"""Talks to a server in a browser and takes pictures: page_screenshots.py URL FOLDER."""

import json
import shutil
import sys
import threading
import urllib.request
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

DESK = {"width": 1040, "height": 620}
TALL = {"width": 1040, "height": 760}
PHONE = {"width": 390, "height": 780}


def main() -> None:
    url, folder = sys.argv[1], Path(sys.argv[2])
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_context(viewport=DESK).new_page()

        def take(name: str, theme: str) -> None:
            page.emulate_media(color_scheme=theme)
            page.mouse.move(0, 0)
            page.screenshot(path=folder / f"{name}.png")

        _talk(page, url)
        take("talk", "light")
        page.get_by_role("button", name="Tree").click()
        page.get_by_label("Answers side by side").select_option("3")
        # Answers with code have buttons of their own.
        choose = ".candidate button:enabled:has-text('Use this answer')"
        _say(page, "Write two lines about rain.", ends=f"{choose} >> nth=2")
        page.locator(choose).nth(1).click()
        page.get_by_text("2 of 3").first.wait_for()
        take("tree", "dark")
        page.set_viewport_size(PHONE)
        page.locator("#tree").get_by_role("button", name="Close").click()
        page.locator(".entry").last.scroll_into_view_if_needed()
        take("phone", "dark")
        page.set_viewport_size(DESK)
        page.goto(f"{url}/#watch")
        asking = [threading.Thread(target=_ask, args=(url, number)) for number in range(14)]
        for thread in asking:
            thread.start()
        page.set_viewport_size(TALL)
        page.get_by_label("Seconds in sight").select_option("30")
        page.locator(".queue li", has_text="place").nth(2).wait_for()
        # Until the lanes have something to show.
        page.wait_for_timeout(20_000)
        page.get_by_role("button", name="Pause").click()
        take("watch", "dark")
        page.set_viewport_size(DESK)
        for thread in asking:
            thread.join()
        page.goto(f"{url}/#fleet")
        page.locator("section[aria-label=Shards] tbody tr").nth(1).wait_for()
        take("fleet", "light")
        browser.close()


def _talk(page: Page, url: str) -> None:
    page.goto(url)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("temperature", exact=True).fill("0.3")
    page.get_by_label("Longest answer, in tokens").fill("120")
    page.locator("#settings").get_by_role("button", name="Close").click()
    _say(page, "Name three rivers of Europe, as a list.")
    _say(page, "Write a Python function that adds two numbers.")


def _say(page: Page, text: str, ends: str = "#composer button[type=submit]:enabled") -> None:
    page.get_by_role("textbox", name="Message").fill(text)
    page.get_by_role("button", name="Send").click()
    page.locator(ends).wait_for(timeout=120_000)


def _ask(url: str, number: int) -> None:
    """Ask something that begins as the others do."""
    rules = "You answer in whole sentences, you are friendly, and you never use more words than you need. " * 6
    messages = [
        {"role": "system", "content": rules},
        {"role": "user", "content": f"Tell me {number + 2} things about rain."},
    ]
    body = json.dumps({"messages": messages, "max_tokens": 160, "seed": number}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=600).read()


main()
