"""Send random load to the demo model with too few KV cells; check that no request fails and resource use does not grow.

PYTHONPATH=tests python -m soak.soak --minutes 20
"""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Callable, Sequence

from caravan_testing.serve_process import Served, serve
from soak.load import RandomLoad
from soak.watch import Sample, growth, line, take

FLAGS = ("-np", "160", "-c", "3072", "-t", "2", "--cache-ram", "100")
CLIENTS = 5
BURST_EVERY_S = 150.0
BURST_TOKENS = 256
MIN_CACHE_USE = 0.95
_SAMPLES = 240
_REST_S = 300.0


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


async def _watch(
    served: Served, load: RandomLoad, seconds: float, report_s: float, enough: Callable[[Sample], bool]
) -> list[Sample]:
    """Take samples for at least ``seconds``, until ``enough`` accepts the last one; print one every ``report_s``."""
    samples: list[Sample] = []
    began = time.monotonic()
    reported = began
    while (now := time.monotonic()) < began + seconds or not enough(samples[-1]):
        samples.append(await asyncio.to_thread(take, served))
        if now - reported >= report_s:
            reported = now
            tally = load.tally
            _say(
                f"{now - began:6.0f} s  requests {tally.requests} ({tally.left} left), errors {len(tally.errors)}  "
                f"{line(samples[-1])}"
            )
        await asyncio.sleep(seconds / _SAMPLES)
    return samples


async def _at_rest(served: Served, descriptors: int | None = None) -> Sample:
    """Wait until no request runs or waits and at most ``descriptors`` are open. Return the last sample.

    After `_REST_S` seconds, return the last sample all the same.
    """
    ends = time.monotonic() + _REST_S
    while True:
        sample = await asyncio.to_thread(take, served)
        quiet = sample.used_cells == sample.queued == sample.swapped == 0
        if (quiet and (descriptors is None or sample.descriptors <= descriptors)) or time.monotonic() > ends:
            return sample
        await asyncio.sleep(0.2)


async def soak(
    served: Served,
    load: RandomLoad,
    *,
    seconds: float,
    report_s: float,
    enough: Callable[[Sample], bool] = lambda _: True,
) -> tuple[list[str], list[Sample]]:
    """Load ``served`` for at least ``seconds``, until ``enough`` accepts the last sample.

    Return all problems and all samples, the last of which was taken at rest.
    """
    before = await _at_rest(served)
    loading = asyncio.create_task(load.run())
    samples = await _watch(served, load, seconds, report_s, enough)
    load.stop.set()
    await loading
    after = await _at_rest(served, before.descriptors)
    _say(f"at rest: {line(after)}")
    complaints = list(load.tally.errors)
    if after.used_cells or after.queued or after.swapped:
        complaints.append("not at rest")
    if after.failures:
        complaints.append(f"{after.failures:.0f} failed requests in the metrics")
    if after.descriptors > before.descriptors:
        complaints.append(f"{after.descriptors} descriptors at rest, {before.descriptors} before")
    return complaints, [*samples, after]


def judge(samples: Sequence[Sample]) -> list[str]:
    """Return the problems of the whole run: growth, too little use of the cache, no preemption."""
    complaints = growth(samples)
    # Cells hold what runs, so they are full in bursts only.
    use = max(sample.cache_use for sample in samples[len(samples) // 4 :])
    _say(f"highest cache use after the first quarter: {use:.1%}")
    if use < MIN_CACHE_USE:
        complaints.append(f"never more than {use:.1%} of the cache was in use")
    if samples[-1].swaps + samples[-1].recomputes == 0:
        complaints.append("no sequence was preempted")
    return complaints


def main() -> int:
    """Run the soak test. Return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    arguments = parser.parse_args()
    _say(f"seed {arguments.seed}, flags {' '.join(FLAGS)}")
    seconds = arguments.minutes * 60
    with serve(*FLAGS) as served:
        load = RandomLoad(
            served.url, clients=CLIENTS, burst_every_s=BURST_EVERY_S, burst_tokens=BURST_TOKENS, seed=arguments.seed
        )
        complaints, samples = asyncio.run(soak(served, load, seconds=seconds, report_s=min(30.0, seconds / 10)))
    complaints += judge(samples)
    for complaint in complaints:
        _say(f"WRONG: {complaint}")
    _say("failed" if complaints else "passed")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
