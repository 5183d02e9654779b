"""Compares Caravan with llama-server: same model, threads and KV cells, one server at a time."""

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bench.batched_bench import EngineRate, engine_rate
from bench.disturbance import least_disturbed, remark
from bench.machine import describe
from bench.paths import CACHE, DEMO_MODEL, BenchError, peer, pinned_version
from bench.profiles import Profile, full, pool, quick
from bench.servers import Contender, Layout, Product, Setting
from bench.session import turn
from bench.table import Results, engine_lines, lines, markdown

_PROFILES = {"quick": quick, "pool": pool, "full": full}


def main() -> int:
    """Measure, print the results, and write them to .cache/bench/."""
    args = _parser().parse_args()
    # SystemExit unwinds through the servers' context managers; the default action would leave the servers running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    profile = _PROFILES[args.profile](args.model.resolve(), args.threads)
    products = tuple(Product) if args.only is None else (Product(args.only),)
    contenders = tuple(Contender(product, layout) for product in products for layout in Layout)
    try:
        _check(args.model)
        measure(profile, contenders, rounds=args.rounds or profile.rounds, idle_limit_s=args.wait_idle)
    except BenchError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="compare", description=__doc__)
    parser.add_argument(
        "--profile",
        choices=tuple(_PROFILES),
        default="full",
        help="quick: one round of the main rows (ten minutes); pool: one round of the rows on shared prefixes, n and "
        "scarce KV cells (ten minutes); full: three rounds of every row",
    )
    parser.add_argument("--rounds", type=int, help="repetitions; medians are reported")
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="GGUF file")
    parser.add_argument("--threads", type=int, default=2, help="compute threads of every server (default 2)")
    parser.add_argument(
        "--wait-idle", type=float, default=60, help="seconds to wait for a quiet machine before each run"
    )
    parser.add_argument("--only", choices=tuple(Product), help="measure only this product")
    return parser


def _check(model: Path) -> None:
    """Raise BenchError now for a missing file that would otherwise stop the run much later."""
    if not model.is_file():
        message = f"no model at {model}: run `make bench`, which fetches it, or pass --model FILE"
        raise BenchError(message)
    for name in ("llama-server", "llama-batched-bench"):
        peer(name)


def measure(profile: Profile, contenders: tuple[Contender, ...], *, rounds: int, idle_limit_s: float) -> None:
    """Run all rounds; write the results so far after each."""
    results: Results = {}
    rates: list[EngineRate] = []
    setting = profile.groups[0].setting
    stem = CACHE / "bench" / time.strftime(f"{profile.name}-%Y%m%d-%H%M%S")
    stem.parent.mkdir(parents=True, exist_ok=True)
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", flush=True)
        # The engine is measured first or last in turn, and the servers rotate, so that a machine that slows down
        # affects all of them equally.
        if number % 2 == 0:
            rates += _engine(setting, profile.batches, idle_limit_s)
        for group in profile.groups:
            for contender in _rotated(contenders, number):
                if contender.layout not in group.layouts:
                    continue
                reports = turn(contender, group, seed=number, idle_limit_s=idle_limit_s)
                results.setdefault((group.name, contender), []).append(reports)
        if number % 2 == 1:
            rates += _engine(setting, profile.batches, idle_limit_s)
        _write(stem, profile, contenders, results, rates)
    print(f"\n{stem.with_suffix('.md').read_text()}\nwritten to {stem}.json and .md", flush=True)


def _rotated(contenders: Sequence[Contender], number: int) -> list[Contender]:
    """Return the contenders in another order for each round: another one first, and every other round reversed."""
    start = number % len(contenders)
    order = [*contenders[start:], *contenders[:start]]
    return order if number % 2 == 0 else order[::-1]


def _engine(setting: Setting, batches: tuple[int, ...], idle_limit_s: float) -> list[EngineRate]:
    return [_one_rate(setting, layout, batch, idle_limit_s) for batch in batches for layout in Layout]


def _one_rate(setting: Setting, layout: Layout, batch: int, idle_limit_s: float) -> EngineRate:
    rate, share = least_disturbed(lambda _: engine_rate(setting, layout, batch), server=(), idle_limit_s=idle_limit_s)
    speed = f"{rate.decode_tokens_per_s:.1f} tokens/s{remark(share)}"
    print(f"  bare engine {layout}, {batch} sequences: {speed}", flush=True)
    return rate


def _write(
    stem: Path, profile: Profile, contenders: tuple[Contender, ...], results: Results, rates: list[EngineRate]
) -> None:
    setting = profile.groups[0].setting
    found = lines(profile.groups, contenders, results)
    found += engine_lines(rates, found, contenders)
    caption = (
        f"{describe()}; {setting.model.name}, {setting.threads} threads, {setting.cells:,} cells; llama.cpp of "
        f"llama-cpp-python {pinned_version()}. The ratio is Caravan's better layout to llama-server's."
    )
    stem.with_suffix(".md").write_text(markdown(found, contenders, rates, caption))
    document = {
        "machine": describe(),
        "profile": profile.name,
        "engine": [asdict(rate) for rate in rates],
        "reports": [
            {"group": group, "contender": str(who), "rounds": rounds} for (group, who), rounds in results.items()
        ],
    }
    stem.with_suffix(".json").write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    sys.exit(main())
