"""Uses the page in a browser: python -m e2e.clients.page_session URL PART...; prints what each part saw as JSON.

NAME=FILE gives a part a file. Each part begins without cookies and storage. Beside its own findings it tells what went
wrong in the page, which must be nothing.
"""

import json
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from e2e.clients import page_content, page_docs, page_keeping, page_talk, page_views
from e2e.clients.page_visit import Visit
from playwright.sync_api import Error, sync_playwright

PARTS: dict[str, Callable[[Visit], Any]] = {
    part.__name__: part
    for part in (
        page_talk.talk,
        page_content.markdown,
        page_talk.branches,
        page_talk.side_by_side,
        page_talk.hostile,
        page_talk.by_keyboard,
        page_talk.tools_and_settings,
        page_content.files,
        page_content.pdf,
        page_talk.completing,
        page_keeping.addresses,
        page_keeping.tabs,
        page_keeping.columns,
        page_keeping.failing,
        page_views.locked,
        page_views.looks,
        page_views.theme,
        page_views.recording,
        page_views.live,
        page_views.fleet,
        page_views.models,
        page_docs.docs,
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
