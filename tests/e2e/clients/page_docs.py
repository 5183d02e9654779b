"""What a visit to `/docs` sees: the contents, an example that is sent and streamed, both themes and widths."""

from typing import Any

from e2e.clients.page_visit import DESK, PHONE, Visit

CHAT = "#chat_completions"


def docs(visit: Visit) -> Any:
    """On a server that needs the key "alice", by keyboard."""
    visit.go("docs")
    page = visit.page
    page.get_by_text("This server needs an API key").wait_for()
    page.get_by_label("API key", exact=True).fill("alice")
    page.get_by_label("API key", exact=True).press("Tab")
    page.locator("#docs-model option").first.wait_for(state="attached")
    found: dict[str, Any] = {"groups": page.locator("nav > details > ul > li > a").all_inner_texts()}
    page.get_by_label("Filter", exact=True).fill("answer a conversation with text")
    page.locator("nav li li:visible a").first.press("Enter")
    chat = page.locator(CHAT)
    chat.locator("form").wait_for()
    found["shown"] = page.locator("section[id^=tag] .folded:visible").count()
    body = chat.get_by_role("textbox")
    found["model"] = page.locator("#docs-model").input_value() in body.input_value()

    def asked(text: str) -> None:
        chat.get_by_role("button", name="Streamed").press("Enter")
        body.fill(body.input_value().replace("Why is the sky blue? Answer in one sentence.", text))
        chat.get_by_role("button", name="Send").press("Enter")

    asked("hello")
    chat.get_by_text("200 in").wait_for()
    found["streamed"] = chat.locator(".answer").inner_text()
    asked("wait")
    # Its words so far, each in an event.
    chat.locator(".answer", has_text="three").wait_for()
    chat.get_by_role("button", name="Stop").press("Enter")
    chat.get_by_text("Stopped").wait_for()
    chat.get_by_role("button", name="Show as curl").press("Enter")
    found["curl"] = chat.locator(".command").inner_text()
    page.get_by_label("Filter", exact=True).fill("")
    stored = page.locator("#get_response")
    stored.locator("summary").press("Enter")
    stored.get_by_role("button", name="Send").press("Enter")
    stored.get_by_text("200 in").wait_for()
    found["id"] = stored.get_by_label("response_id").input_value()
    found["stored"] = stored.locator(".answer").inner_text()
    found |= {"unreadable": [], "wide": []}
    for width in (DESK, PHONE):
        page.set_viewport_size(width)
        page.reload()
        page.locator("#docs-model option").first.wait_for(state="attached")
        # The address names it.
        chat.locator("form").wait_for()
        # What is folded is not checked, and would take most of a minute to walk through.
        page.evaluate("document.querySelectorAll('.folded:not([open]) > .inside').forEach((part) => part.remove())")
        found.setdefault("contents", []).append(page.locator("#docs-contents").get_attribute("open") is not None)
        for theme in ("light", "dark"):
            page.emulate_media(color_scheme=theme)
            found["unreadable"] += visit.unreadable()
            if visit.overflows():
                found["wide"].append([theme, width])
    # The browser itself notes the answer before there was a key.
    visit.wrong = [text for text in visit.wrong if "Failed to load resource" not in text]
    return found
