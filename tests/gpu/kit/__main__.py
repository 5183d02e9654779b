"""The command of the kit: `tests/gpu/kit.sh`."""

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

from gpu.kit.job import RESULTS, Job, KitError, kept, out_folder, size_table, travelling
from gpu.kit.report import KINDS, Page, page_text
from gpu.kit.stages import STAGES, End, Stage, records, run


def main() -> int:
    """Run what the arguments say; return the status to exit with."""
    parser = _parser()
    args = parser.parse_args()
    # Not `choices` of the argument, of which argparse demands that no stage at all be one, too.
    if unknown := set(args.stages) - {"pack", "size", *(stage.name for stage in STAGES)}:
        parser.error(f"no such stage: {', '.join(sorted(unknown))}")
    try:
        if args.stages in (["pack"], ["size"]):
            if args.stages == ["pack"]:
                from gpu.kit import pack  # what it imports is in the environment of who develops

                pack.pack(args.python)
            print(size_table(travelling()))
            return 0
        return _run(args)
    except KitError as error:
        print(f"kit: {error}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace) -> int:
    job = Job(rehearsal=args.rehearsal, until=time.time() + args.limit_s)
    known = records()
    chosen = [stage for stage in STAGES if stage.name in args.stages]
    if not args.stages:
        chosen = [stage for stage in STAGES if stage.name not in known or _is_left(stage, known[stage.name].end)]
    RESULTS.mkdir(parents=True, exist_ok=True)
    end = End.DONE
    with (RESULTS / "kit.log").open("a") as log:
        for stage in chosen:
            end = run(stage, job, log)
            if end is End.UNFINISHED or (end is End.FAILED and stage.needed):
                break
    _leave(args.out, rehearsal=args.rehearsal)
    if end is End.UNFINISHED:
        print("not finished: start it again with the same arguments, and it goes on from here")
    failed = [name for name, record in records().items() if record.end is End.FAILED]
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 75 if end is End.UNFINISHED else int(bool(failed))


def _is_left(stage: Stage, end: End) -> bool:
    """Whether a stage that ended so runs again: none can follow a failure of one that the others need."""
    return end is End.UNFINISHED or (end is End.FAILED and stage.needed)


def _leave(out: Path, *, rehearsal: bool) -> None:
    """Write the page and the figures behind it to ``out``, in few files."""
    results = {kind: kept(kind) for kind in KINDS}
    page = page_text(Page(rehearsal=rehearsal, stages=records(), results=results))
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.md").write_text(page)
    (out / "results.json").write_text(json.dumps(results, indent=1))
    for name in ("kit.log", "stages.json"):
        if out != RESULTS and (RESULTS / name).is_file():
            shutil.copy(RESULTS / name, out / name)
    print(f"written to {out / 'report.md'}")


def _parser() -> argparse.ArgumentParser:
    stages = "\n".join(f"  {stage.name:<16}{stage.what}" for stage in STAGES)
    parser = argparse.ArgumentParser(
        prog="kit.sh",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Builds, tests and measures on a host with CUDA and without a network.",
        epilog=f"With a network, before that:\n  pack            what has to travel\n  size            its size\n\n"
        f"Stages, by default all that have not ended yet:\n{stages}",
    )
    add = parser.add_argument
    add("stages", nargs="*", metavar="STAGE")
    add("--python", default="3.12", help="pack: version of the Python of that host (default 3.12)")
    add("--rehearsal", action="store_true", help="on the CPU, with small models and few rounds")
    add(
        "--out",
        type=Path,
        default=out_folder(),
        help="where results are left (default: $OUT, or .cache/gpu-kit/results)",
    )
    add("--limit-s", type=float, default=540.0, help="seconds after which to stop, to be started again (default 540)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
