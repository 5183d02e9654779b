"""What a visitor does before and beside the talk: each function is a part of a session."""

from typing import Any

from e2e.clients.page_visit import DESK, PHONE, THEMES, Visit
from playwright.sync_api import Page


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
    visit.say("written")
    visit.say("think")
    page.get_by_label("Files", exact=True).set_input_files(
        {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"x"}
    )
    found: dict[str, Any] = {"unreadable": [], "wide": [], "grounds": {}}
    for theme in THEMES:
        visit.system_theme(theme)
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
    page.locator(".answer-body").first.wait_for()
    found["share"] = page.evaluate("document.querySelector('#transcript').clientHeight / innerHeight")
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


def theme(visit: Visit) -> Any:
    """The switch of the theme, over what the system has."""
    visit.go()
    page = visit.page
    visit.system_theme("dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    grounds = [page.evaluate(ground)]
    for name in ("system", "light"):
        visit.button(f"Theme: {name}").click()
        grounds.append(page.evaluate(ground))
    page.emulate_media(color_scheme="light")
    page.reload()
    visit.button("Theme: dark").wait_for()
    return {"grounds": [*grounds, page.evaluate(ground)]}


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
    for theme in THEMES:
        visit.system_theme(theme)
        found["unreadable"] += visit.unreadable()
    page.set_viewport_size(PHONE)
    found["unreadable"] += visit.unreadable()
    found["wide"] = visit.overflows()
    found["names"] = shards.locator("td:first-child div:first-child").all_inner_texts()
    page.set_viewport_size(DESK)
    page.get_by_role("button", name="Flush").first.click()
    found["question"] = page.locator("dialog h2").inner_text()
    page.locator("dialog").get_by_role("button", name="Flush").click()
    page.locator("dialog").wait_for(state="detached")
    drains = page.get_by_role("button", name="Drain")
    drains.first.click()
    page.locator("dialog").get_by_role("button", name="Cancel").click()
    found["kept"] = drains.count()
    page.route("**/admin/shards", lambda route: route.abort())
    page.get_by_text("The server does not answer.").wait_for()
    page.unroute("**/admin/shards")
    drains.first.wait_for()
    # The browser itself notes what was aborted.
    visit.wrong = [text for text in visit.wrong if "Failed to load resource" not in text]
    drains.first.click()
    page.locator("dialog").get_by_role("button", name="Drain").click()
    page.locator(".state.draining, .state.lost, .state.joining").first.wait_for()
    return found


def models(visit: Visit) -> Any:
    """On a server with a model ``a`` that is not loaded."""
    visit.go("#fleet")
    page = visit.page
    questions = []
    for name in ("Load", "Unload"):
        visit.button(f"{name} a").click()
        questions.append(page.locator("dialog").inner_text())
        page.locator("dialog").get_by_role("button", name=name).click()
    visit.button("Load a").wait_for()
    return {"questions": questions}


def recording(visit: Visit) -> Any:
    """Opens the recording of `caravan_testing.page_engine`."""
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
    for theme in THEMES:
        visit.system_theme(theme)
        found["unreadable"] += visit.unreadable()
    page.set_viewport_size(PHONE)
    found["unreadable"] += visit.unreadable()
    found["wide"] = visit.overflows()
    found["plays"] = lanes.evaluate(
        """lanes => {
            lanes.dispatchEvent(new KeyboardEvent("keydown", { key: " " }));
            return document.querySelector("#watch .bar button").textContent;
        }"""
    )
    visit.button("Back to live").click()
    # What is told changes with the next frame.
    page.locator(".told", has_not_text="recording").wait_for()
    found["live"] = page.locator(".told").inner_text()
    return found


def _step_under_pointer(page: Page) -> str:
    """Return what is told of the last step."""
    box = page.locator("canvas.timeline").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] - 4, box["y"] + 48)
    page.locator(".under", has_text="decode").wait_for()
    return str(page.locator(".under").inner_text())


# Whether a canvas looks the same when later steps have come, up to which the slider then reaches.
_STILL = """canvas => new Promise((resolve) => {
    const [slider, first] = [document.querySelector("#watch .scrub"), canvas.toDataURL()];
    const end = slider.max;
    const look = () => {
        if (slider.max === end) requestAnimationFrame(look);
        else resolve(canvas.toDataURL() === first);
    };
    look();
})"""


def live(visit: Visit) -> Any:
    """On a server with more requests than places."""
    visit.go("#watch")
    page = visit.page
    page.locator(".queue li").first.wait_for()
    # One stream at a time, however the view is reached.
    with page.expect_event("requestfailed", lambda request: request.url.endswith("admin/timeline")):
        visit.go("#watch/again")
    waiting = page.locator(".queue li").first.inner_text()
    page.locator(".map").nth(1).wait_for()
    visit.button("Pause").click()
    page.locator(".told", has_text="paused").wait_for()
    still = page.locator("canvas.timeline").evaluate(_STILL)
    visit.button("Go on").click()
    page.locator(".told", has_text="live").wait_for()
    visit.go("#talk")
    return {"waiting": waiting, "still": still, "lanes": page.locator("canvas.timeline").get_attribute("aria-label")}
