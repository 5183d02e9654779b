"""A visit to the page in a browser, with notes of what goes wrong in it."""

from typing import Final, Literal
from urllib.parse import urlsplit

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, Request

PHONE = {"width": 375, "height": 667}
DESK = {"width": 1280, "height": 800}
THEMES: Final[tuple[Literal["light", "dark"], ...]] = ("light", "dark")
# Counts what the policy of the page forbids.
WATCH_POLICY = """
window.violations = [];
addEventListener("securitypolicyviolation", ({ violatedDirective, blockedURI }) =>
  violations.push(violatedDirective + " " + blockedURI));
"""
SERIOUS = {"serious", "critical"}
# For what happens at once unless the machine is busy.
MOST_MS = 300_000


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

    def opened(self) -> None:
        """Wait until a conversation is read and shown, which on wide screens ends with this."""
        self.page.locator("#composer textarea:focus").wait_for()

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

    def system_theme(self, name: Literal["light", "dark"]) -> None:
        """Change the theme of the system, which the page follows."""
        self.page.emulate_media(color_scheme=name)
        self.page.locator(f"html[data-theme={name}]").wait_for()

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
