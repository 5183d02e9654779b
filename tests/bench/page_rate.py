"""Measures how often the page draws what the scheduler does. Not run by the tests.

``PYTHONPATH=tests python -m bench.page_rate``: Chromium shows eight toy shards with 25 streams each for ``--seconds``.
Prints the frames per second, the time between two of them, and the processor time of the page's own script for one. It
needs Chromium and the environment of ``make test-clients``.
"""

import argparse
import asyncio
import json
import sys
from pathlib import Path

from bench.toy_fleet import ToyFleet, toy_streams
from caravan_testing.serve_process import ROOT

_PYTHON = ROOT / ".cache/clients/page/bin/python"
_BROWSER = Path(__file__).parent / "page_browser.py"


async def measure(fleet: ToyFleet, seconds: float) -> dict[str, float]:
    """Return what `page_browser.py` prints."""
    async with toy_streams(fleet) as (_, url, _):
        browser = await asyncio.create_subprocess_exec(
            _PYTHON, _BROWSER, url, str(seconds), stdout=asyncio.subprocess.PIPE
        )
        out, _ = await browser.communicate()
    assert browser.returncode == 0
    found: dict[str, float] = json.loads(out)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--streams", type=int, default=25, help="of each shard")
    parser.add_argument("--step-ms", type=float, default=25.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args()
    found = asyncio.run(measure(ToyFleet(given.shards, given.streams, given.step_ms), given.seconds))
    sys.stdout.writelines(f"{name}: {value:.1f}\n" for name, value in found.items())


if __name__ == "__main__":
    main()
