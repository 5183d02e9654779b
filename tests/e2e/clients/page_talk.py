"""What a visitor does where the page talks: each function is a part of a session and returns what it saw."""

import json
from typing import Any

from e2e.clients.page_visit import Visit


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
    page.get_by_label("Actions for first").click()
    visit.button("Delete first").click()
    page.get_by_text("Ask something.").wait_for()
    left = page.locator(".families .family").count()
    visit.button("Undo").click()
    page.get_by_text("Something else.").wait_for()
    return {
        "forked": forked,
        "nodes": nodes,
        "back": back,
        "question": question,
        "rewound": rewound,
        "anew": anew,
        "changed": changed,
        "left": left,
        "undone": page.locator(".families .family").all_inner_texts(),
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
    # A message of a megabyte without a break.
    long = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "m" * 1_000_000}]}
    nodes = [{"id": "a", "parent": None, "kind": "answer", "items": [long], "status": "done"}]
    conversation = {"title": "\u202e<b>long</b>", "tip": "a", "nodes": nodes}
    file = {"format": "caravan-conversations", "version": 1, "conversations": [conversation]}
    visit.go()
    page = visit.page
    visit.say("hostile")
    made = (
        page.locator(".answer-body")
        .locator("script, iframe, img, svg:not(.icon), style, form, button:not(.code-head button)")
        .count()
    )
    links = page.locator(".answer-body a").evaluate_all("links => links.map((link) => [link.protocol, link.rel])")
    wide = visit.overflows()
    content = {"name": "long.json", "mimeType": "application/json", "buffer": json.dumps(file).encode()}
    page.get_by_label("File to import").set_input_files(content)
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
