"""What a visitor expects to be kept: each function is a part of a session and returns what it saw."""

from pathlib import Path
from typing import Any

from e2e.clients.page_visit import Visit
from playwright.sync_api import Page, Route

TITLES = ".families .family"


def addresses(visit: Visit) -> Any:
    """Each conversation has an address, a name, and a text that is found, and comes back from a file."""
    visit.go()
    page = visit.page
    visit.say("likely")
    first = page.url
    visit.button("New conversation").click()
    page.get_by_text("Ask something.").wait_for()
    visit.say("second")
    second, title = page.url, page.title()
    page.go_back()
    page.get_by_text("You said likely.").wait_for()
    back = page.url
    page.reload()
    page.get_by_text("You said likely.").wait_for()
    _menu(visit, "second", "Rename")
    page.get_by_role("textbox", name="Name").fill("Renamed")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Renamed", exact=True).wait_for()
    search = page.get_by_role("searchbox")
    search.fill("said sec")
    page.locator(TITLES).get_by_text("likely").wait_for(state="detached")
    found = page.locator(TITLES).all_inner_texts()
    search.fill("")
    page.locator(TITLES).get_by_text("likely").wait_for()
    exported = _download(visit, "likely", "Export")
    markdown = _download(visit, "likely", "Export as Markdown").read_text()
    _menu(visit, "likely", "Delete")
    page.get_by_text("You said second.").wait_for()
    page.get_by_label("File to import").set_input_files(exported)
    page.get_by_text("You said likely.").wait_for()
    # What is imported goes on as what was written here.
    visit.say("more")
    page.get_by_label("File to import").set_input_files(
        {"name": "a.json", "mimeType": "application/json", "buffer": b'{"a": 1}'}
    )
    refused = page.locator(".notice.error span").inner_text()
    page.goto(f"{visit.url}/#talk/nothing")
    page.get_by_text("This browser has no such conversation.").wait_for()
    # The browser tells of errors, which are meant here.
    visit.wrong = []
    return {
        "own": len({first, second, visit.url}),
        "title": title,
        "back": back == first,
        "found": found,
        "markdown": markdown,
        "refused": refused,
        "titles": sorted(page.locator(TITLES).all_inner_texts()),
    }


def _menu(visit: Visit, title: str, action: str) -> None:
    visit.page.get_by_label(f"Actions for {title}").click()
    visit.button(f"{action} {title}").click()


def _download(visit: Visit, title: str, action: str) -> Path:
    with visit.page.expect_download() as download:
        _menu(visit, title, action)
    return Path(download.value.path())


def tabs(visit: Visit) -> Any:
    """Two tabs show one conversation and write to it at the same time."""
    visit.go()
    first = visit.page
    visit.say("one")
    second = visit.context.new_page()
    second.goto(first.url)
    second.get_by_text("You said one.").wait_for()
    visit.say("two")
    second.get_by_text("You said two.").wait_for()
    followed = _answers(second)
    for page in (first, second):
        page.get_by_role("textbox", name="Message").fill("both" if page is first else "at once")
    for page in (first, second):
        page.get_by_role("button", name="Send").click()
    first.get_by_text("You said both.").wait_for()
    second.get_by_text("You said at once.").wait_for()
    # An answer that grows is seen in both, and goes on when the tab that asked is closed.
    visit.button("New conversation").click()
    first.get_by_text("Ask something.").wait_for()
    visit.message().fill("wait")
    visit.button("Send").click()
    first.get_by_text("one two three").wait_for()
    second.goto(first.url)
    second.get_by_text("one two three").wait_for()
    first.close()
    visit.page = second
    visit.button("Stop").click()
    visit.ended()
    stopped = _answers(second)
    visit.button("one").click()
    second.get_by_text("You said two.").wait_for()
    visit.button("Tree").click()
    nodes = second.locator("#tree .node").all_inner_texts()
    return {
        "followed": followed,
        "stopped": stopped,
        "nodes": len(nodes),
        "meanwhile": second.evaluate(_SAY_WHILE_READING),
    }


# Says something while what is stored is being read; returns the texts of the conversation.
_SAY_WHILE_READING = """async () => {
    const base = document.querySelector("script[src$='main.js']").src;
    const { Conversation } = await import(new URL("../talk/conversation.js", base));
    const talked = new Conversation(null, () => ({}));
    await talked.say("one");
    const { getAll } = IDBIndex.prototype;
    const reading = new Promise((begun) => {
        IDBIndex.prototype.getAll = function (...given) {
            begun();
            return getAll.apply(this, given);
        };
    });
    const loading = talked.load();
    await reading;
    await Promise.all([loading, talked.say("two")]);
    return talked.items.flatMap(({ content }) => content.map(({ text }) => text));
}"""


def _answers(page: Page) -> list[str]:
    texts: list[str] = page.locator(".entry.answer .answer-body").all_inner_texts()
    return texts


def columns(visit: Visit) -> Any:
    """Answers side by side have sampling parameters of their own, and can be chosen later."""
    visit.go()
    page = visit.page
    sent: list[Any] = []
    page.on("request", lambda request: sent.append(request.post_data_json) if request.method == "POST" else None)
    page.get_by_label("Answers side by side").select_option("2")
    page.get_by_text("Sampling of each answer").click()
    page.get_by_label("temperature of answer 1").fill("0")
    page.get_by_label("temperature of answer 2").fill("1.5")
    page.get_by_label("seed of answer 2").fill("7")
    page.get_by_label("seed of answer 2").blur()
    unreadable = visit.unreadable()
    visit.message().fill("choose")
    visit.button("Send").click()
    page.locator(".candidate button:enabled").nth(1).wait_for()
    page.reload()
    page.locator(".candidate button:enabled").nth(1).wait_for()
    headings = page.locator(".candidate h3").all_inner_texts()
    page.locator(".candidate").nth(1).get_by_role("button", name="Use this answer").click()
    page.get_by_text("2 of 2").wait_for()
    answers = visit.answers()
    page.get_by_label("Answers side by side").select_option("2")
    visit.message().fill("wait")
    visit.button("Send").click()
    page.locator(".candidate", has_text="one two three").nth(1).wait_for()
    visit.button("Stop").click()
    page.locator(".candidate button:enabled", has_text="Use this answer").nth(1).click()
    with page.expect_request("**/v1/chat/completions"):
        visit.button("Continue").click()
    page.get_by_text("one two three four five").wait_for()
    fields = [{name: body.get(name) for name in ("temperature", "seed")} for body in sent if body]
    return {"sent": fields, "headings": headings, "unreadable": unreadable, "answers": answers}


# Types, and looks at the button to send, as soon as they are there, when no conversation has been read.
_TYPES_EARLY = """
if (!sessionStorage.typed)
  new MutationObserver((_, observer) => {
    const field = document.querySelector("#composer textarea");
    if (!field) return;
    observer.disconnect();
    sessionStorage.typed = true;
    sessionStorage.couldSend = !document.querySelector("#composer button[type=submit]").disabled;
    field.value = "a d";
    field.dispatchEvent(new Event("input", { bubbles: true }));
  }).observe(document, { childList: true, subtree: true });
"""


def failing(visit: Visit) -> Any:
    """What cannot be answered stays, also what is not sent yet; and what the server forgot is told to it again."""
    page = visit.page
    page.add_init_script(_TYPES_EARLY)
    visit.go()
    visit.opened()
    page.reload()
    visit.opened()
    visit.message().press_sequentially("raft")
    page.reload()
    visit.opened()
    draft = visit.message().input_value()
    page.route("**/v1/responses", lambda route: route.abort())
    visit.message().fill("keep me")
    visit.button("Send").click()
    visit.button("Try again").wait_for()
    box, composer = page.locator(".entry.answer").bounding_box(), page.locator("#composer").bounding_box()
    assert box is not None
    assert composer is not None
    covers = box["y"] + box["height"] > composer["y"] or page.locator(".notice").count()
    page.reload()
    visit.button("Try again").wait_for()
    page.unroute("**/v1/responses")
    visit.button("Try again").click()
    page.get_by_text("You said keep me.").wait_for()
    visit.ended()
    with page.expect_request("**/v1/responses") as continued:
        visit.say("next")
    page.route("**/v1/responses", _forgetful)
    sent: list[Any] = []
    page.on("request", lambda request: sent.append(request.post_data_json) if request.method == "POST" else None)
    visit.say("after a restart")
    page.unroute("**/v1/responses", _forgetful)
    page.route("**/v1/responses", _full)
    visit.message().fill("too long")
    visit.button("Send").click()
    visit.button("Drop the oldest turns and try again").click()
    page.get_by_text("You said too long.").wait_for()
    page.unroute("**/v1/responses", _full)
    lost: list[str] = []

    def lose(route: Route) -> None:
        lost.append(route.fetch().text())
        route.abort()

    page.route("**/v1/responses", lose)
    visit.message().fill("lost")
    visit.button("Send").click()
    visit.button("Try again").wait_for()
    page.unroute("**/v1/responses", lose)
    with page.expect_response("**/v1/responses") as again:
        visit.button("Try again").click()
    page.get_by_text("You said lost.").wait_for()
    visit.ended()
    visit.wrong = [text for text in visit.wrong if "Failed to load resource" not in text]
    return {
        "draft": draft,
        "could_send": page.evaluate("sessionStorage.couldSend"),
        "same": [again.value.text()] == lost,
        "covers": bool(covers),
        "continued": continued.value.post_data_json["previous_response_id"][:5],
        "resent": [[len(body["input"]), "previous_response_id" in body] for body in sent[:2]],
        "meter": page.locator(".context").inner_text(),
        "checked": page.get_by_label("Drop the oldest turns").is_checked(),
        "answers": visit.answers(),
        "notices": page.locator(".notice").count(),
    }


def _forgetful(route: Route) -> None:
    """Answers as a server that was started anew."""
    if "previous_response_id" in (route.request.post_data_json or {}):
        _refuse(route, 404, "not_found")
    else:
        route.continue_()


def _full(route: Route) -> None:
    """Answers as a model of which the context is full."""
    if (route.request.post_data_json or {}).get("truncation") == "auto":
        route.continue_()
    else:
        _refuse(route, 400, "context_length_exceeded")


def _refuse(route: Route, status: int, code: str) -> None:
    error = {"message": "It cannot be answered.", "code": code, "type": "invalid_request_error"}
    route.fulfill(status=status, json={"error": error})
