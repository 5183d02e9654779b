"""The profiles of the comparison: which rows of which models, how often, and on how old servers."""

from dataclasses import dataclass

from bench.embedding_rows import EMBEDDING_ROWS
from bench.overhead_rows import OVERHEAD_ROWS
from bench.rows import MAIN_ROWS, Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """``age_prompts`` prompts of ``age_words`` words age each server, which has ``threads`` compute threads.

    ``between`` is the number of other prompts that come before a prefix returns.
    """

    rows: tuple[Row, ...]
    models: tuple[str, ...]
    rounds: int
    age_prompts: int
    age_words: int
    between: int
    threads: int = 2


PROFILES = {
    "quick": Profile(rows=MAIN_ROWS, models=("smollm2-q4_1",), rounds=3, age_prompts=16, age_words=300, between=50),
    "full": Profile(
        rows=MAIN_ROWS,
        models=("smollm2-q4_1", "smollm2-q4_0", "gemma-3-270m"),
        rounds=5,
        age_prompts=48,
        age_words=400,
        between=1000,
    ),
    # One compute thread leaves a core to what is measured.
    "overhead": Profile(
        rows=OVERHEAD_ROWS,
        models=("tiny-49k", "tiny-152k", "tiny-262k"),
        rounds=3,
        age_prompts=64,
        age_words=100,
        between=50,
        threads=1,
    ),
    "embeddings": Profile(
        rows=EMBEDDING_ROWS,
        models=("smollm2-q4_1", "bert-q8_0"),
        rounds=3,
        age_prompts=64,
        age_words=100,
        between=50,
    ),
}
