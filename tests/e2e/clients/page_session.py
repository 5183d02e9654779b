"""Uses the page in a browser: page_session.py URL PART...; prints what each part saw as JSON.

NAME=FILE gives a part a file. Each part begins without cookies and storage. Beside its own findings it tells what went
wrong in the page, which must be nothing.
"""

import base64
import json
import shutil
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, ConsoleMessage, Error, Locator, Page, Request, sync_playwright

PHONE = {"width": 375, "height": 720}
DESK = {"width": 1280, "height": 800}
# Counts what the policy of the page forbids.
WATCH_POLICY = """
window.violations = [];
addEventListener("securitypolicyviolation", ({ violatedDirective, blockedURI }) =>
  violations.push(violatedDirective + " " + blockedURI));
"""
SERIOUS = {"serious", "critical"}
# For what happens at once unless the machine is busy.
MOST_MS = 60_000


class Visit:
    """A page that is looked at, with notes of what goes wrong in it."""

    def __init__(self, browser: Browser, url: str, file: str) -> None:
        self.url = url
        self.file = file
        self.context = browser.new_context(viewport=DESK)
        self.context.add_init_script(WATCH_POLICY)
        self.context.set_default_timeout(MOST_MS)
        self.page: Page = self.context.new_page()
        self.wrong: list[str] = []
        self.page.on("console", self._note_message)
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("request", self._note_request)

    def _note_message(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.wrong.append(message.text)

    def _note_request(self, request: Request) -> None:
        if urlsplit(request.url).netloc != urlsplit(self.url).netloc and not request.url.startswith(("data:", "blob:")):
            self.wrong.append(request.url)

    def go(self, view: str = "") -> None:
        self.page.goto(f"{self.url}/{view}")

    def button(self, name: str) -> Locator:
        return self.page.get_by_role("button", name=name, exact=True)

    def message(self) -> Locator:
        return self.page.get_by_role("textbox", name="Message")

    def say(self, text: str) -> None:
        """Send a message and wait for the end of its answer."""
        self.message().fill(text)
        self.button("Send").click()
        self.ended()

    def ended(self) -> None:
        self.page.locator("#composer button[type=submit]:enabled").wait_for()

    def answers(self) -> list[str]:
        texts: list[str] = self.page.locator(".entry.answer .answer-body").all_inner_texts()
        return texts

    def entry(self, text: str) -> Locator:
        return self.page.locator(".entry", has_text=text).last

    def overflows(self) -> bool:
        """Whether the page is wider than the screen."""
        return bool(self.page.evaluate("document.documentElement.scrollWidth > innerWidth"))

    def unreadable(self) -> list[str]:
        """Return what a checker of accessibility finds and calls serious."""
        found = Axe().run(self.page).response["violations"]
        return [
            f"{one['id']}: {one['nodes'][0]['html'][:200]} {one['nodes'][0]['failureSummary'][:300]}"
            for one in found
            if one["impact"] in SERIOUS
        ]

    def end(self) -> list[str]:
        """Return what went wrong."""
        self.wrong += self.page.evaluate("window.violations")
        self.context.close()
        return self.wrong


def talk(visit: Visit) -> Any:
    visit.go()
    page = visit.page
    visit.message().fill("wait")
    visit.message().press("Enter")
    page.get_by_text("one two three").wait_for()
    streaming = {"stop": visit.button("Stop").is_visible(), "busy": page.locator("[aria-busy=true]").count()}
    visit.button("Stop").click()
    visit.ended()
    stopped = visit.answers()
    visit.button("Continue").click()
    page.get_by_text("one two three four five").wait_for()
    visit.ended()
    continued = visit.answers()
    visit.say("rich")
    code, table = page.locator(".code pre"), page.locator(".scrolls table")
    rich = {
        "heading": page.locator(".markdown h1").inner_text(),
        "code": code.inner_text(),
        "cells": table.locator("td").all_inner_texts(),
        "link": page.locator(".markdown a").get_attribute("rel"),
    }
    visit.say("think")
    thought = page.locator("details.thought")
    folded = thought.get_attribute("open") is None
    thought.locator("summary").click()
    cost = page.locator(".entry.answer").last.locator(".cost").inner_text()
    page.reload()
    page.get_by_text("one two three four five").wait_for()
    return {
        "streaming": streaming,
        "stopped": stopped,
        "continued": continued,
        "rich": rich,
        "folded": folded,
        "thought": page.locator("details.thought .thought-text").text_content(),
        "cost": cost,
        "kept": len(visit.answers()),
        "title": page.locator("#title").inner_text(),
        "announced": page.locator("#announcer").inner_text(),
    }


def branches(visit: Visit) -> Any:
    visit.go()
    page = visit.page
    visit.say("first")
    visit.say("second")
    visit.entry("You said first").get_by_role("button", name="Fork").click()
    page.get_by_text("You said second").wait_for(state="detached")
    visit.say("third")
    forked = visit.answers()
    visit.entry("You said third").get_by_role("button", name="Another answer").click()
    visit.ended()
    visit.entry("You said third").get_by_text("2 of 2").wait_for()
    visit.button("Tree").click()
    tree = page.locator("#tree")
    tree.locator(".node").first.wait_for()
    nodes = tree.locator(".node").all_inner_texts()
    tree.locator(".node", has_text="second").first.click()
    page.locator("#transcript").get_by_text("You said second").wait_for()
    back = visit.answers()
    tree.get_by_role("button", name="Close").click()
    visit.entry("You said first").get_by_role("button", name="Rewind to here").click()
    question = page.locator("dialog h2").inner_text()
    page.locator("dialog").get_by_role("button", name="Rewind").click()
    page.locator("#transcript").get_by_text("You said second").wait_for(state="detached")
    rewound = visit.answers()
    mine = page.locator(".entry.message", has_text="first").last
    mine.get_by_role("button", name="Edit").click()
    page.get_by_role("textbox", name="New text").fill("fourth")
    visit.button("Ask anew in a fork").click()
    page.locator("#transcript").get_by_text("You said fourth").wait_for()
    visit.ended()
    anew = visit.answers()
    visit.entry("You said fourth").get_by_role("button", name="Edit").click()
    page.get_by_role("textbox", name="New text").fill("Something else.")
    visit.button("Change here").click()
    page.get_by_text("Something else.").wait_for()
    changed = visit.answers()
    visit.button("Delete first").click()
    page.locator("dialog").get_by_role("button", name="Delete").click()
    page.get_by_text("Ask something.").wait_for()
    return {
        "forked": forked,
        "nodes": nodes,
        "back": back,
        "question": question,
        "rewound": rewound,
        "anew": anew,
        "changed": changed,
        "left": page.locator(".families li").count(),
    }


def side_by_side(visit: Visit) -> Any:
    visit.go()
    page = visit.page
    page.get_by_label("Answers side by side").select_option("3")
    visit.message().fill("choose")
    visit.button("Send").click()
    page.locator(".candidate button:enabled").nth(2).wait_for()
    shown = page.locator(".candidate .answer-body").all_inner_texts()
    blocked = visit.button("Send").is_disabled()
    page.locator(".candidate").nth(1).get_by_role("button", name="Use this answer").click()
    page.get_by_text("2 of 3").wait_for()
    page.get_by_label("Answers side by side").select_option("1")
    visit.say("more")
    return {"shown": shown, "blocked": blocked, "answers": visit.answers()}


def hostile(visit: Visit) -> Any:
    # A stored message of a megabyte without a break, and one with everything that could run.
    items = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "m" * 1_000_000}]
    body = json.dumps({"items": items, "metadata": {"title": "\u202e<b>long</b>"}}).encode()
    request = urllib.request.Request(f"{visit.url}/v1/conversations", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        conversation = json.load(response)["id"]
    family = [
        {
            "root": conversation,
            "title": "\u202e<b>long</b>",
            "branches": [conversation],
            "shown": conversation,
            "usage": {},
        }
    ]
    visit.go()
    page = visit.page
    visit.say("hostile")
    made = (
        page.locator(".answer-body")
        .locator("script, iframe, img, svg, style, form, button:not(.code-head button)")
        .count()
    )
    links = page.locator(".answer-body a").evaluate_all("links => links.map((link) => [link.protocol, link.rel])")
    wide = visit.overflows()
    page.evaluate("families => localStorage.setItem('caravan.families', JSON.stringify(families))", family)
    page.reload()
    more = page.get_by_role("button", name="Show the other 900")
    more.wait_for()
    first = len(page.locator(".as-is").inner_text())
    more.click()
    return {
        "ran": page.evaluate("window.ran ?? null"),
        "made": made,
        "links": links,
        "wide": wide or visit.overflows(),
        "first": first,
        "whole": page.locator(".as-is").evaluate_all(
            "all => all.reduce((sum, one) => sum + one.textContent.length, 0)"
        ),
    }


def by_keyboard(visit: Visit) -> Any:
    """Tab, letters, Enter and Escape only."""
    visit.go()
    page = visit.page

    def tab_to(name: str) -> None:
        for _ in range(60):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.ariaLabel || document.activeElement.innerText") == name:
                return
        raise AssertionError(f"{name} cannot be reached")

    page.locator(":focus").wait_for()
    began = page.evaluate("document.activeElement.ariaLabel")
    page.keyboard.type("wait")
    page.keyboard.press("Enter")
    page.get_by_text("one two three").wait_for()
    page.keyboard.press("Escape")
    visit.ended()
    tab_to("Message") if page.evaluate("document.activeElement.ariaLabel") != "Message" else None
    page.keyboard.type("again")
    page.keyboard.press("Enter")
    page.get_by_text("You said again").wait_for()
    visit.ended()
    page.evaluate("document.activeElement.blur()")
    tab_to("Fork")
    visible = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    page.keyboard.press("Enter")
    page.get_by_text("You said again").wait_for(state="detached")
    page.evaluate("document.activeElement.blur()")
    tab_to("Settings")
    page.keyboard.press("Enter")
    opened = page.locator("#settings").is_visible()
    page.keyboard.press("Escape")
    return {
        "began": began,
        "outline": visible,
        "opened": opened,
        "closed": page.locator("#settings").is_hidden(),
        "back": page.evaluate("document.activeElement.innerText"),
    }


def tools_and_settings(visit: Visit) -> Any:
    visit.go()
    page = visit.page
    visit.button("Settings").click()
    temperature = page.get_by_label("temperature", exact=True)
    temperature.wait_for()
    limits = [temperature.get_attribute("min"), temperature.get_attribute("max")]
    temperature.fill("101")
    temperature.blur()
    refused = temperature.evaluate("field => !field.validity.valid")
    temperature.fill("0.5")
    page.get_by_label("Instructions").fill("Be brief.")
    tool = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
    page.get_by_label("Tools", exact=True).fill(json.dumps([tool]))
    page.locator("#settings").get_by_role("button", name="Close").click()
    with page.expect_request("**/v1/responses") as sent:
        visit.message().fill("weather")
        visit.button("Send").click()
    body = json.loads(sent.value.post_data or "")
    output = page.get_by_label("Output of weather")
    output.wait_for()
    call = page.locator("details.call").first.locator("pre").text_content()
    output.fill("Rain.")
    visit.button("Give it to the model").click()
    page.get_by_text("You said").wait_for()
    visit.ended()
    return {
        "limits": limits,
        "refused": refused,
        "body": {name: body.get(name) for name in ("temperature", "instructions", "stream")},
        "call": call,
        "answers": visit.answers(),
    }


def pictures(visit: Visit) -> Any:
    """Where the list of models says that the model sees; the scripted engine itself refuses pictures."""
    visit.go()
    page = visit.page
    blind = visit.button("Add a picture").is_visible()
    sees = {"input_modalities": ["text", "image"], "output_modalities": ["text"]}
    models = {"object": "list", "data": [{"id": "scripted", "architecture": sees}]}
    page.route("**/v1/models", lambda route: route.fulfill(json=models))
    page.reload()
    visit.button("Add a picture").wait_for()
    drawn = page.evaluate("Object.assign(document.createElement('canvas'), { width: 3000, height: 10 }).toDataURL()")
    content = base64.b64decode(drawn.partition(",")[2])
    page.get_by_label("Pictures").set_input_files({"name": "a.png", "mimeType": "image/png", "buffer": content})
    page.get_by_alt_text("Picture 1").wait_for()
    visit.message().fill("What is this?")
    with page.expect_request("**/v1/responses") as sent:
        visit.button("Send").click()
    picture, text = json.loads(sent.value.post_data or "")["input"][0]["content"]
    url = picture.pop("image_url")
    measure = "url => new Promise((done) => Object.assign(new Image(), { src: url, onload() { done(this.width) } }))"
    page.locator(".notice.error").wait_for()
    restored = visit.message().input_value()
    # The browser itself notes answers that are errors.
    visit.wrong = [text for text in visit.wrong if "Failed to load resource" not in text]
    width = page.evaluate(measure, url)
    return {"blind": blind, "parts": [picture, text], "url": url[:23], "width": width, "restored": restored}


def completing(visit: Visit) -> Any:
    visit.go("#complete")
    page = visit.page
    page.get_by_label("Prompt").fill("Once")
    page.keyboard.press("Control+Enter")
    page.locator(".token").nth(2).wait_for()
    page.locator(".token").nth(1).hover()
    told = page.locator(".token-told").inner_text()
    page.locator(".tokens").press("ArrowRight")
    moved = page.locator(".token-told").inner_text()
    visit.button("Add to the prompt").click()
    prompt = page.get_by_label("Prompt").input_value()
    visit.go("#talk")
    visit.say("likely")
    visit.entry("You said likely").get_by_role("button", name="Probabilities").click()
    page.locator("#transcript .token").first.wait_for()
    tokens = page.locator("#transcript .token").all_text_contents()
    return {"told": told, "moved": moved, "prompt": prompt, "tokens": tokens}


def locked(visit: Visit) -> Any:
    """With API keys; the key of the part is the second one."""
    visit.go()
    page = visit.page
    screen = page.locator("body").inner_text()
    app = page.locator("#app").is_visible()
    unreadable = visit.unreadable()
    page.get_by_label("API key").fill("alice")
    visit.button("Continue").click()
    visit.say("hello")
    kept = page.evaluate("[localStorage, sessionStorage].map((area) => JSON.stringify(area).includes('alice'))")
    page.reload()
    page.get_by_text("You said hello").wait_for()
    visit.button("Sign out").click()
    page.get_by_label("API key").wait_for()
    hidden = page.get_by_text("You said hello").count()
    page.get_by_label("API key").fill("bob")
    visit.button("Continue").click()
    page.get_by_text("Ask something.").wait_for()
    others = page.get_by_text("You said hello").count()
    # The browser itself notes answers that are errors.
    visit.wrong = [text for text in visit.wrong if "Failed to load resource" not in text]
    return {"screen": screen, "app": app, "unreadable": unreadable, "kept": kept, "hidden": hidden, "others": others}


def looks(visit: Visit) -> Any:
    """Both themes and both widths of the views that a scripted engine fills."""
    visit.go()
    page = visit.page
    visit.say("rich")
    visit.say("think")
    found: dict[str, Any] = {"unreadable": [], "wide": [], "grounds": {}}
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        found["grounds"][theme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
        for width in (DESK, PHONE):
            page.set_viewport_size(width)
            for view in ("talk", "complete"):
                page.evaluate("view => { location.hash = view }", view)
                page.locator(f"#{view}").wait_for()
                found["unreadable"] += visit.unreadable()
                if visit.overflows():
                    found["wide"].append([theme, view, width])
    visit.go("#talk")
    for name in ("Conversations", "Tree", "Settings"):
        visit.button(name).click()
        box = page.locator(f"#{name.lower()}")
        box.wait_for()
        covers = box.bounding_box()
        assert covers is not None
        found.setdefault("covers", []).append(covers["width"])
        if name == "Settings":
            page.get_by_label("temperature", exact=True).wait_for()
        found["unreadable"] += visit.unreadable()
        page.keyboard.press("Escape")
    return found


def fleet(visit: Visit) -> Any:
    """On a server of several shards that an operator may see."""
    visit.go("#talk")
    page = visit.page
    visit.message().fill("Tell me of the sea.")
    visit.button("Send").click()
    visit.ended()
    visit.go("#fleet")
    shards = page.locator("section[aria-label=Shards] tbody tr")
    shards.nth(1).wait_for()
    found: dict[str, Any] = {"rows": shards.count(), "unreadable": []}
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        found["unreadable"] += visit.unreadable()
    page.set_viewport_size(PHONE)
    found["wide"] = visit.overflows()
    page.set_viewport_size(DESK)
    page.get_by_role("button", name="Flush").first.click()
    found["question"] = page.locator("dialog h2").inner_text()
    page.locator("dialog").get_by_role("button", name="Flush").click()
    page.locator("dialog").wait_for(state="detached")
    drains = page.get_by_role("button", name="Drain")
    drains.first.click()
    page.locator("dialog").get_by_role("button", name="Cancel").click()
    found["kept"] = drains.count()
    drains.first.click()
    page.locator("dialog").get_by_role("button", name="Drain").click()
    page.locator(".state.draining, .state.lost, .state.joining").first.wait_for()
    return found


def recording(visit: Visit) -> Any:
    """Opens the recording of `caravan_testing.page_recording`."""
    visit.go("#watch")
    page = visit.page
    page.get_by_text("Pause").wait_for()
    page.get_by_label("Recording").set_input_files(visit.file)
    visit.button("Back to live").wait_for()
    found: dict[str, Any] = {"unreadable": [], "before": page.locator(".queue").inner_text()}
    lanes = page.locator("canvas.timeline")
    lanes.press("ArrowRight")
    lanes.press("ArrowRight")
    lanes.press("ArrowRight")
    page.locator(".told", has_text="3.0 s of 3.0 s").wait_for()
    found["slider"] = page.get_by_label("Time", exact=True).input_value()
    found["waiting"] = page.locator(".queue li").inner_text()
    found["cells"] = page.locator(".map").inner_text()
    found["figures"] = page.locator(".figures").inner_text()
    found["told"] = page.locator(".told").inner_text()
    found["step"] = _step_under_pointer(page)
    colours = lanes.evaluate(
        "canvas => new Set(canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data).size"
    )
    found["drawn"] = colours > 8
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        found["unreadable"] += visit.unreadable()
    page.set_viewport_size(PHONE)
    found["wide"] = visit.overflows()
    found["plays"] = lanes.evaluate(
        """lanes => {
            lanes.dispatchEvent(new KeyboardEvent("keydown", { key: " " }));
            return document.querySelector("#watch .bar button").textContent;
        }"""
    )
    visit.button("Back to live").click()
    found["live"] = page.locator(".told").inner_text()
    return found


def _step_under_pointer(page: Page) -> str:
    """Return what is told of the last step."""
    box = page.locator("canvas.timeline").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] - 4, box["y"] + 48)
    page.locator(".under", has_text="decode").wait_for()
    return str(page.locator(".under").inner_text())


def live(visit: Visit) -> Any:
    """On a server with more requests than places."""
    visit.go("#watch")
    page = visit.page
    page.locator(".queue li").first.wait_for()
    waiting = page.locator(".queue li").first.inner_text()
    page.locator(".map").nth(1).wait_for()
    visit.button("Pause").click()
    page.locator(".told", has_text="paused").wait_for()
    drawn = "canvas => canvas.toDataURL()"
    first = page.locator("canvas.timeline").evaluate(drawn)
    page.wait_for_timeout(300)
    still = first == page.locator("canvas.timeline").evaluate(drawn)
    visit.button("Go on").click()
    page.locator(".told", has_text="live").wait_for()
    visit.go("#talk")
    return {"waiting": waiting, "still": still, "lanes": page.locator("canvas.timeline").get_attribute("aria-label")}


PARTS: dict[str, Callable[[Visit], Any]] = {
    part.__name__: part
    for part in (
        talk,
        branches,
        side_by_side,
        hostile,
        by_keyboard,
        tools_and_settings,
        pictures,
        completing,
        locked,
        looks,
        recording,
        live,
        fleet,
    )
}


def main() -> None:
    url, *names = sys.argv[1:]
    results: dict[str, Any] = {}
    with sync_playwright() as playwright:
        # Root has no sandbox in containers.
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for part in names:
            name, _, file = part.partition("=")
            begun = time.monotonic()
            visit = Visit(browser, url, file)
            try:
                results[name] = PARTS[name](visit)
            except (Error, AssertionError):
                shown = visit.page.locator("body").inner_text()[-2000:]
                results[name] = {"failed": f"{traceback.format_exc()}\nThe page showed: {shown}"}
            results[name]["wrong"] = visit.end()
            print(f"{name}: {time.monotonic() - begun:.1f} s", file=sys.stderr)
        browser.close()
    print(json.dumps(results))


main()
