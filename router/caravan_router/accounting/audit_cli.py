"""The command `caravan audit`: checks an audit log, without a router."""

import sys
from collections.abc import Sequence
from pathlib import Path

from caravan_proto.command_line import Parser
from caravan_router.accounting.chain import START, BrokenChainError, Head, checked, ends_of


def audit_parser() -> Parser:
    """Return the parser of `caravan audit`."""
    parser = Parser(prog="caravan audit", description="Check that an audit log is as it was written.")
    parser.add_argument("action", choices=["verify"], help="verify: read all lines, and check their hashes")
    parser.add_argument("file", nargs="+", type=Path, help="the files of one log, the oldest first")
    parser.add_argument(
        "--after", metavar="HASH", help="hash of the line before the first one, where older files are gone"
    )
    parser.add_argument(
        "--head", metavar="HASH", help="hash of a line that was the last one earlier: fail if it is missing now"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print what was found. Return 0 if each line is what was written, 1 if not, 2 if a file cannot be read."""
    arguments = audit_parser().parse_args(argv)
    head, hashes = START, set[str]()
    try:
        for number, path in enumerate(arguments.file):
            try:
                with path.open("rb") as lines:
                    if number == 0 and arguments.after is not None:
                        head = _given(lines.readline(), arguments.after)
                        lines.seek(0)
                    for line in lines:
                        head = checked(line, head)
                        hashes.add(head.hash)
            except BrokenChainError as error:
                sys.stderr.write(f"caravan audit: {path}: {error}\n")
                return 1
    except OSError as error:
        sys.stderr.write(f"caravan audit: error: {error.filename}: {error.strerror}\n")
        return 2
    if arguments.head is not None and arguments.head not in hashes:
        sys.stderr.write(f"caravan audit: lines are missing: none has the hash {arguments.head}\n")
        return 1
    sys.stdout.write(f"{head.line} lines, the last one has the hash {head.hash}\n")
    return 0


def _given(line: bytes, after: str) -> Head:
    """Return the head that ``line`` follows, which must have the hash ``after``. Raises BrokenChainError."""
    ends = ends_of(line)
    if ends is None or ends[0].hash != after:
        raise BrokenChainError(f"the first line does not follow a line with the hash {after}")
    return ends[0]
