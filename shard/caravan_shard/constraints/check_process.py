"""`python -m caravan_shard.constraints.check_process`: compiles constraints in a process that may die of it.

A grammar of a few bytes can take minutes, gigabytes, or more stack than there is, and a thread cannot be stopped in any
of these. Here each ends this process and nothing else. The shard compiles again what this process has survived.

The process reads frames from standard input: a length (4 bytes, little-endian), then that many bytes of marshal data.
The first frame is the token table, every other one a constraint. It answers each with a frame: the sentence of the
problem, empty if there is none.
"""

import marshal
import os
import resource
import signal
import struct
import sys
import threading
from pathlib import Path
from typing import Any, BinaryIO

from llguidance import LLTokenizer

from caravan_proto.messages.constraint import Constraint, ConstraintKind
from caravan_shard.constraints.grammar import Problem, find_problem, make_matcher
from caravan_shard.constraints.tokenizer import TokenTable, make_tokenizer

# Processor time for one constraint. The largest real schemas take some 0.1 s.
MAX_CPU_S = 2.0
# Address space, beyond what the process uses before the first constraint.
MAX_MEMORY_BYTES = 256 << 20
# Less than any thread of the shard has: a source that is not too deep here is not too deep there.
_STACK_BYTES = 1 << 20
_NICENESS = 10
_LENGTH = struct.Struct("<I")
HEAD_BYTES = _LENGTH.size


def write_frame(value: Any) -> bytes:
    """Return the frame of ``value``."""
    data = marshal.dumps(value)
    return _LENGTH.pack(len(data)) + data


def frame_size(head: bytes) -> int:
    """Return how many bytes follow the four of a frame's head."""
    return int(_LENGTH.unpack(head)[0])


def main() -> None:
    """Serve until standard input ends."""
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(sys.stdin.buffer, sys.stdout.buffer))
    thread.start()
    thread.join()


def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    tokenizer = make_tokenizer(TokenTable(*_read_frame(requests)))
    _limit_memory()
    _answer(answers, "")
    while (asked := _read_frame(requests)) is not None:
        kind, source = asked
        # SIGPROF ends the process when the time is over.
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
        problem = _check(Constraint(ConstraintKind(kind), source), tokenizer)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _answer(answers, "" if problem is None else problem.sentence)


def _check(constraint: Constraint, tokenizer: LLTokenizer) -> Problem | None:
    try:
        matcher = make_matcher(constraint, tokenizer)
    except MemoryError:
        return Problem(f"{constraint.kind.value} takes too much memory to compile")
    if isinstance(matcher, Problem):
        return matcher
    # Each sequence copies the matcher and computes a first mask: the check includes both.
    matcher = matcher.deep_copy()
    matcher.compute_bitmask()
    return find_problem(constraint.kind.value, matcher)


def _answer(answers: BinaryIO, sentence: str) -> None:
    answers.write(write_frame(sentence))
    answers.flush()


def _read_frame(requests: BinaryIO) -> Any:
    head = requests.read(HEAD_BYTES)
    return marshal.loads(requests.read(frame_size(head))) if len(head) == HEAD_BYTES else None  # noqa: S302  the shard wrote it


def _limit_memory() -> None:
    sizes = Path("/proc/self/statm")
    if sizes.exists():
        most = int(sizes.read_text().split()[0]) * resource.getpagesize() + MAX_MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    main()
