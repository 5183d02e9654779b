"""The C code of `shard/kernels` under gcc's sanitizers: they report nothing, and they do report bugs that are put in.

Each program draws its inputs from a seed: sizes at the edges of vectors and parts, numbers of threads, NaN and
infinities, rows that see nothing, vocabularies of one token.
"""

import platform
import sys
from pathlib import Path

import pytest

from caravan_testing.c_kernels import MEMORY, RACES, Change, Checker, run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="needs gcc's sanitizers"),
]

_DRAWING = ("draw_rows.c", "draw_weighed.c")
_DRAWERS = ("draw_check.c", "openmp_of_pthreads.c")
BARRIER = Checker(("barrier_check.c",), ("barrier.c",), ("4", "1000", "0"))
SLOW_BARRIER = Checker(("barrier_check.c",), ("barrier.c",), ("3", "30", "5000"))
DRAWS = Checker(_DRAWERS, _DRAWING, ("1", "2000"), ("-pthread", "-fopenmp"))
SHARED_DRAWS = Checker(_DRAWERS, _DRAWING, ("2", "300"), ("-pthread", "-fopenmp"))
LOGPROBS = Checker(("logprob_check.c",), ("logprob_rows.c",), ("1", "2000"))
# It includes flash_attention.c, for what that has to itself.
ATTENTION = Checker(("attention_check.c",), ("row_by_row.c", "barrier.c"), ("1", "250"))
SHARED_ATTENTION = Checker(("attention_check.c",), ("row_by_row.c", "barrier.c"), ("2", "120"))
STATES = Checker(("states_check.c",), ("take_states.c",), ("1", "2000"))


@pytest.mark.parametrize("vectors", [(), ("-march=native",)], ids=["any processor", "this processor"])
@pytest.mark.parametrize("checker", [DRAWS, LOGPROBS, ATTENTION], ids=lambda one: one.name)
def test_nothing_outside_of_the_rows_is_touched(checker: Checker, vectors: tuple[str, ...], tmp_path: Path) -> None:
    ended = run(checker, tmp_path, *MEMORY, *vectors)
    assert ended.status == 0, ended.output


@pytest.mark.parametrize("checker", [BARRIER, SLOW_BARRIER, STATES], ids=lambda one: one.name)
def test_nothing_outside_of_counters_and_states_is_touched(checker: Checker, tmp_path: Path) -> None:
    ended = run(checker, tmp_path, *MEMORY)
    assert ended.status == 0, ended.output


@pytest.mark.parametrize(
    "checker", [BARRIER, SLOW_BARRIER, SHARED_DRAWS, SHARED_ATTENTION], ids=lambda one: " ".join((one.name, *one.given))
)
def test_threads_that_share_rows_do_not_race(checker: Checker, tmp_path: Path) -> None:
    ended = run(checker, tmp_path, *RACES)
    assert ended.status == 0, ended.output


@pytest.mark.parametrize(
    ("checker", "change", "report"),
    [
        pytest.param(
            DRAWS,
            Change("logits.h", "? logits->values[id] : -INFINITY", "? logits->values[id + 1] : -INFINITY"),
            "AddressSanitizer: heap-buffer-overflow",
            id="a logit behind the last one of a row",
        ),
        pytest.param(
            DRAWS,
            Change("logits.h", "bits |= logits->mask[id / 8 + 1] << 8;", "bits |= logits->mask[id / 8 + 2] << 8;"),
            "AddressSanitizer: heap-buffer-overflow",
            id="a byte behind a mask",
            marks=pytest.mark.skipif(
                "avx512f" not in Path("/proc/cpuinfo").read_text(), reason="only vectors of 16 read two bytes of a mask"
            ),
        ),
        pytest.param(
            DRAWS,
            Change("draw_rows.c", "if (!(total >= 1.0)) {", "if (0) {"),
            "index -1 out of bounds",
            id="the candidate before the first one, as for a temperature that is 0 as a float",
        ),
        pytest.param(
            LOGPROBS,
            Change("logprob_rows.c", "if (candidates == MOST_CANDIDATES) {", "if (0) {"),
            "logprob_rows.c",
            id="more candidates than there is room for",
        ),
        pytest.param(
            DRAWS,
            Change("draw_rows.c", "count * size >= LOGITS", "(int) (count * size) * 100000 >= LOGITS"),
            "signed integer overflow",
            id="a product that is too large",
        ),
        pytest.param(
            ATTENTION,
            Change("attention_plan.h", "return left >= 0;", "return left >= -1;"),
            "AddressSanitizer: heap-buffer-overflow",
            id="a float more than the work buffer has",
        ),
        pytest.param(
            STATES,
            Change("take_states.c", " && bytes <= states->room;", ";"),
            "AddressSanitizer: heap-buffer-overflow",
            id="states that do not fit",
        ),
    ],
)
def test_a_planted_bug_is_reported(checker: Checker, change: Change, report: str, tmp_path: Path) -> None:
    ended = run(checker, tmp_path, *MEMORY, "-march=native", change=change)
    assert ended.status != 0
    assert report in ended.output


@pytest.mark.parametrize(
    ("checker", "change"),
    [
        pytest.param(
            BARRIER,
            Change("barrier.c", "atomic_fetch_add(passed, 1);", "atomic_fetch_add_explicit(passed, 1, 0);"),
            id="a barrier that does not publish what was written before it",
        ),
        pytest.param(
            SHARED_DRAWS,
            Change(
                "draw_rows.c",
                "        tokens[at] = ",
                "        static volatile int drawn;\n        drawn++;\n        tokens[at] = ",
            ),
            id="threads that count their rows together",
        ),
        pytest.param(
            SHARED_ATTENTION,
            Change("flash_attention.c", "        ggml_barrier(params->threadpool);\n        join_parts", "join_parts"),
            id="parts that are joined before all are there",
        ),
    ],
)
def test_a_planted_race_is_reported(checker: Checker, change: Change, tmp_path: Path) -> None:
    ended = run(checker, tmp_path, *RACES, change=change)
    assert ended.status != 0
    assert "ThreadSanitizer: data race" in ended.output
