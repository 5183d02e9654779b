"""Shows the steps of a server in Chromium: page_browser.py URL SECONDS; prints how often they were drawn, as JSON."""

import json
import shutil
import sys
from itertools import pairwise
from statistics import quantiles

from playwright.sync_api import sync_playwright

# Times of frames, in milliseconds, for so many seconds.
FRAMES = """seconds => new Promise(resolve => {
  const times = [];
  const note = time => {
    times.push(time);
    if (time - times[0] < 1000 * seconds) requestAnimationFrame(note); else resolve(times);
  };
  requestAnimationFrame(note);
})"""


def main() -> None:
    """Look for some seconds, after as many that are not counted."""
    url, seconds = sys.argv[1], float(sys.argv[2])
    with sync_playwright() as playwright:
        # Root has no sandbox in containers.
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto(f"{url}/#watch")
        page.locator(".told", has_text="live").wait_for()
        page.evaluate(FRAMES, seconds)
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable")
        before = script_s(session.send("Performance.getMetrics"))
        times = page.evaluate(FRAMES, seconds)
        after = script_s(session.send("Performance.getMetrics"))
        told = page.locator(".told").inner_text()
        browser.close()
    gaps = [later - earlier for earlier, later in pairwise(times)]
    parts = quantiles(gaps, n=100)
    found = {
        "frames per second": 1000 * len(gaps) / (times[-1] - times[0]),
        "median gap, ms": parts[49],
        "gap of which 1 % are longer, ms": parts[98],
        "longest gap, ms": max(gaps),
        "script for a frame, ms": 1000 * (after - before) / len(gaps),
    }
    print(told, file=sys.stderr)
    print(json.dumps(found))


def script_s(metrics: dict[str, list[dict[str, object]]]) -> float:
    """Return the processor time of all scripts of a page, in seconds."""
    return next(float(str(one["value"])) for one in metrics["metrics"] if one["name"] == "ScriptDuration")


main()
