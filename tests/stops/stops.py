"""Stop shards while calls of every kind run; check that each ends with status 0 and each call as it may.

PYTHONPATH=tests python -m stops.stops --stops 200
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from caravan_testing.serve_process import Served, start
from stops.callers import StoppedModel, stop_directly, write_models
from stops.served import ServedStops
from stops.tally import Stopped, summary

# In turn. Half of the stops are of processes that this program has started itself.
_WAYS = ("sigterm", "drain", "admin", "unload")
# A busy host does not make the router give up a shard: it would refuse to drain one that it does not hold.
_LIBRARY_FLAGS = ("--shard-silence-s", "600", "--shard-grace-s", "120", "--log-level", "info")


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


async def stop_many(count: int, seed: int, ways: Sequence[str] = _WAYS) -> list[Stopped]:
    """Stop ``count`` shards and return what each stop has shown. The first numbers of stops have each model and way."""
    with tempfile.TemporaryDirectory(prefix="stops") as name:
        folder = Path(name)
        models = await asyncio.to_thread(write_models, folder)
        done = []
        for number, way in enumerate(ways):
            these = len(range(number, count, len(ways)))
            seeds = range(seed + 1000 * number, seed + 1000 * number + these)
            if way in ("sigterm", "drain"):
                for place, one in enumerate(seeds):
                    done.append(await stop_directly(way, models[place % len(models)], folder, one))
                    _report(done[-1])
            else:
                done += await _stop_served(way, models, folder, seeds)
    return done


async def _stop_served(way: str, models: Sequence[StoppedModel], folder: Path, seeds: Sequence[int]) -> list[Stopped]:
    done: list[Stopped] = []
    if way == "admin":
        # The server has shards of one model only.
        models = models[:1]
        flags = ["--shards", "2", "--alias", models[0].name, *models[0].flags]
        making = start(*flags, *_LIBRARY_FLAGS, models=[models[0].file])
    else:
        flags = ["--models-file", str(_models_file(models, folder)), *_LIBRARY_FLAGS]
        making = start(*flags, models=())
    served: Served = await asyncio.to_thread(making.__enter__)
    try:
        async with aiohttp.ClientSession(served.url, connector=aiohttp.TCPConnector(limit=0)) as session:
            stops = ServedStops(served, session)
            for place, one in enumerate(seeds):
                model = models[place % len(models)]
                done.append(await (stops.drain(model, one) if way == "admin" else stops.unload(model, one)))
                _report(done[-1])
                if served.process.poll() is not None:
                    _say("".join(served.log[-40:]))
                    break
    finally:
        await asyncio.to_thread(making.__exit__, None, None, None)
    return done


def _models_file(models: Sequence[StoppedModel], folder: Path) -> Path:
    lines = []
    for model in models:
        lines += ["[[models]]", f'name = "{model.name}"', f"model = {json.dumps(str(model.file))}"]
        lines.append(f"flags = {json.dumps([*model.flags])}")
    file = folder / "models.toml"
    file.write_text("\n".join(lines))
    return file


def _report(stopped: Stopped) -> None:
    _say(str(stopped))
    for problem in stopped.problems:
        _say(f"  PROBLEM: {problem}")


def main(argv: Sequence[str] | None = None) -> int:
    """Return 1 if a stop shows a problem."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stops", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ways", nargs="+", choices=_WAYS, default=_WAYS)
    given = parser.parse_args(argv)
    done = asyncio.run(stop_many(given.stops, given.seed, given.ways))
    _say(summary(done))
    failed = sum(bool(stopped.problems) for stopped in done)
    _say(f"{len(done)} stops, {failed} with problems")
    return 1 if failed or len(done) < given.stops else 0


if __name__ == "__main__":
    sys.exit(main())
