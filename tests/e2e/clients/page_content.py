"""What a visitor sees of answers with Markdown, and sends of files: each function is a part of a session."""

import base64
import itertools
import json
import struct
import zlib
from typing import Any

from e2e.clients.page_visit import Visit


def markdown(visit: Visit) -> Any:
    visit.go()
    page = visit.page
    visit.say("written")
    answer = page.locator(".answer-body")
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    copied = []
    for copy in (answer.get_by_role("button", name="Copy"), page.locator(".answer .tools").get_by_label("Copy")):
        copy.evaluate(_NOTE_TITLE)
        copy.click()
        while not page.evaluate("copied"):
            page.wait_for_timeout(50)
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


# Whether a button has been called "Copied", which it is for two seconds.
_NOTE_TITLE = """(button) => {
    window.copied = false;
    const look = () => (window.copied ||= button.title === "Copied");
    new MutationObserver(look).observe(button, { attributes: true });
}"""
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
    url: str = picture.pop("image_url")
    measure = "url => new Promise((done) => Object.assign(new Image(), { src: url, onload() { done(this.width) } }))"
    visit.button("Try again").wait_for()
    page.reload()
    visit.button("Try again").wait_for()
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
        "kept": page.get_by_alt_text("Image that was sent").get_attribute("src") == url,
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
    content: bytes = page.pdf()
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
