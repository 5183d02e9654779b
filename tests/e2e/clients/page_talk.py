"""What a visitor does where the page talks: each function is a part of a session and returns what it saw."""

import base64
import itertools
import json
import struct
import urllib.request
import zlib
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


def markdown(visit: Visit) -> Any:
    visit.go()
    page = visit.page
    visit.say("written")
    answer = page.locator(".answer-body")
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    copied = []
    for copy in (answer.get_by_role("button", name="Copy"), page.locator(".answer .tools").get_by_label("Copy")):
        copy.click()
        copy.and_(page.locator("[title=Copied]")).wait_for()
        visit.message().fill("")
        visit.message().press("Control+V")
        copied.append(visit.message().input_value())
        visit.message().fill("")
    return {
        "starts": answer.locator("ol").evaluate_all("lists => lists.map(({ start }) => start)"),
        "checks": [answer.get_by_role("img", name=name).count() for name in ("Done", "To do")],
        "inputs": answer.locator("input").count(),
        "right": answer.locator("td").last.evaluate("cell => getComputedStyle(cell).textAlign"),
        "cells": answer.locator("td").evaluate_all("cells => cells.map((cell) => cell.innerHTML)"),
        "folded": answer.locator("details summary").inner_text(),
        "formulas": answer.locator("math").evaluate_all("all => all.map((one) => one.textContent.slice(0, 12))"),
        "coloured": answer.locator("pre .hljs-keyword").all_inner_texts(),
        "text": answer.locator("p", has_text="Costs").inner_text(),
        "links": answer.locator("a").evaluate_all("links => links.map((link) => link.href)"),
        "copied": copied,
        "announced": page.locator("#announcer").inner_text(),
        "mangled": page.evaluate(_GROW, ["so \\(a_1 + b_1\\) is", "so \\[\n x\n- y\n\\] is"]),
    }


# Shows every beginning of some texts as they grow; returns those that show something else than a formula or its source.
_GROW = """async (texts) => {
    const base = document.querySelector("script[src$='main.js']").src;
    const { GrowingMarkdown } = await import(new URL("../talk/markdown.js", base));
    const mangled = [];
    for (const text of texts) {
        const shown = new GrowingMarkdown();
        for (let end = 1; end <= text.length; end += 1) {
            shown.update(text.slice(0, end));
            if (shown.node.querySelector("em, li, ul")) mangled.push(text.slice(0, end));
            const source = shown.node.querySelector("code.tex")?.textContent;
            if (source !== undefined && !text.slice(0, end).includes(source)) mangled.push(source);
        }
        if (!shown.node.querySelector("math")) mangled.push(text);
    }
    return mangled;
}"""


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
        .locator("script, iframe, img, svg:not(.icon), style, form, button:not(.code-head button)")
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


def files(visit: Visit) -> Any:
    """Where the list of models says that the model reads images; the scripted engine itself refuses them."""
    visit.go()
    page = visit.page
    attach = page.get_by_label("Files", exact=True)
    names = page.locator(".attachment-name")
    drawn = page.evaluate("Object.assign(document.createElement('canvas'), { width: 3000, height: 10 }).toDataURL()")
    image = {"name": "a.png", "mimeType": "image/png", "buffer": base64.b64decode(drawn.partition(",")[2])}
    text = {"name": "notes.md", "mimeType": "text/markdown", "buffer": "# Größe\r\n".encode()}
    packed = {"name": "b.zip", "mimeType": "application/zip", "buffer": b"PK\x03\x04\x00\xff"}
    document = {"name": "c.pdf", "mimeType": "application/pdf", "buffer": _pdf(visit)}
    attach.set_input_files([image, text, packed, document])
    names.nth(1).wait_for()
    refused = page.locator(".notice.error").all_inner_texts()
    page.get_by_role("button", name="Remove c.pdf").click()
    _drop(visit, "dropped.txt", "from the desktop")
    page.locator(".attachment", has_text="dropped.txt").wait_for()
    attached = page.locator(".attachment").all_inner_texts()
    attach.set_input_files(document)
    page.locator(".attachment", has_text="c.pdf").wait_for()
    with page.expect_request("**/v1/responses") as sent:
        visit.say("What is this?")
    parts = [part["text"] for part in json.loads(sent.value.post_data or "")["input"][0]["content"]]
    folded = page.locator(".sent-file summary").all_inner_texts()
    page.get_by_text("You said").wait_for()
    sees = {"input_modalities": ["text", "image", "audio"], "output_modalities": ["text"]}
    models = {"object": "list", "data": [{"id": "scripted", "architecture": sees}]}
    page.route("**/v1/models", lambda route: route.fulfill(json=models))
    page.reload()
    page.get_by_text("You said").wait_for()
    # The name of another format: the browser decodes it, and the server gets a WAV file.
    attach.set_input_files([image, {"name": "d.ogg", "mimeType": "audio/ogg", "buffer": _wave()}])
    page.locator(".attachment", has_text="d.ogg").wait_for()
    with page.expect_request("**/v1/responses") as sent:
        visit.button("Send").click()
    picture, sound = json.loads(sent.value.post_data or "")["input"][0]["content"]
    url = picture.pop("image_url")
    measure = "url => new Promise((done) => Object.assign(new Image(), { src: url, onload() { done(this.width) } }))"
    page.locator(".notice.error").wait_for()
    # The browser itself notes answers that are errors.
    visit.wrong = [text for text in visit.wrong if "Failed to load resource" not in text]
    return {
        "refused": [text.removesuffix("\nDismiss") for text in refused],
        "attached": attached,
        "parts": parts,
        "folded": folded,
        "url": url[:23],
        "width": page.evaluate(measure, url),
        "sound": [sound["type"], sound["input_audio"]["format"], sound["input_audio"]["data"][:5]],
        "restored": page.locator(".attachment img").count(),
    }


def pdf(visit: Visit) -> Any:
    """Texts of files in the forms that programs write, and reasons why others cannot be read."""
    visit.go()
    page = b"BT /F 12 Tf 1 0 0 1 50 700 Tm [(Hel) -20 (lo) -300 (w\\366rld)] TJ 0 -14 Td <41> Tj ( \\(b\\)) Tj ET"
    font = b"<< /Type /Font /Subtype /Type1 /Encoding /WinAnsiEncoding >>"
    tree = [b"<< /Type /Catalog /Pages 2 0 R >>", b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>"]
    tree.append(b"<< /Type /Page /Parent 2 0 R /Resources << /Font << /F 4 0 R >> >> /Contents 5 0 R >>")
    plain = [*tree, font, _stream(page)]
    packed = b" ".join([b"1 0 2 %d 3 %d 4 %d" % _offsets([*tree, font])])
    inside = _stream(zlib.compress(packed + b" " + b" ".join([*tree, font])), b"/Filter /FlateDecode")
    named = inside.replace(b"<<", b"<< /Type /ObjStm /N 4 /First %d" % (len(packed) + 1), 1)
    numbers = {5: _stream(zlib.compress(page), b"/Filter /FlateDecode"), 6: named}
    files = {
        "plain": _file(dict(enumerate(plain, 1))),
        "packed": _file(numbers),
        "damaged": _file(dict(enumerate(plain, 1)))[:-20],
        "encrypted": _file(dict(enumerate(plain, 1))) + b"trailer << /Encrypt 9 0 R >>",
        "other": b"GIF89a",
        "unknown": _file(dict(enumerate([*tree, font, _stream(b"x", b"/Filter /LZWDecode")], 1))),
    }
    return {name: visit.page.evaluate(_READ_PDF, list(content)) for name, content in files.items()}


_READ_PDF = """async (content) => {
    const base = document.querySelector("script[src$='main.js']").src;
    const { textOfPdf } = await import(new URL("../talk/pdf.js", base));
    return textOfPdf(Uint8Array.from(content)).catch((error) => `Error: ${error.message}`);
}"""


def _stream(content: bytes, more: bytes = b"") -> bytes:
    return b"<< /Length %d %s >>\nstream\n%s\nendstream" % (len(content), more, content)


def _file(objects: dict[int, bytes]) -> bytes:
    return b"%PDF-1.5\n" + b"".join(b"%d 0 obj\n%s\nendobj\n" % pair for pair in objects.items())


def _offsets(objects: list[bytes]) -> tuple[int, ...]:
    """Return where each but the first begins, with a space between them."""
    return tuple(itertools.accumulate(len(one) + 1 for one in objects[:-1]))


def _wave() -> bytes:
    samples = bytes(3200)
    head = b"WAVEfmt " + struct.pack("<IHHIIHH", 16, 1, 1, 16_000, 32_000, 2, 16) + b"data"
    return b"RIFF" + struct.pack("<I", 36 + len(samples)) + head + struct.pack("<I", len(samples)) + samples


def _pdf(visit: Visit) -> bytes:
    page = visit.context.new_page()
    page.set_content("<h1>Invoice</h1><p>The total is <b>1,234.50 €</b>.</p>")
    content = page.pdf()
    page.close()
    return content


def _drop(visit: Visit, name: str, text: str) -> None:
    visit.page.locator("#talk").evaluate(
        """(place, [name, text]) => {
            const dataTransfer = new DataTransfer();
            dataTransfer.items.add(new File([text], name, { type: "text/plain" }));
            for (const type of ["dragenter", "dragover", "drop"])
                place.dispatchEvent(new DragEvent(type, { dataTransfer, bubbles: true, cancelable: true }));
        }""",
        [name, text],
    )


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
