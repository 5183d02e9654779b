"""Counts texts that drafts change: `PYTHONPATH=tests python -m bench.draft_equality MODEL`.

Continues each prompt without drafts, and with that output as the prediction, of which some tokens are wrong.
For texts that differ, prints how far apart the two best logits were at the first difference.
"""

import argparse
import pydoc_data.topics
import random
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter_ns

from caravan_proto.messages.commands import Chunk, Decode, FilterBatch, Prefill
from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.config import ShardConfig
from caravan_shard.engine.drafts import DraftBudget, Drafting
from caravan_shard.engine.engine import Engine
from caravan_shard.protocol.commands import PreparedParameters
from caravan_shard.protocol.results import StepResult, TokenRows
from caravan_shard.sequences.runs import RunStore
from caravan_shard.service.loading import backend_loader

_SPECULATE = 6
_WRONG = 0.2
_TEXTS = [str(text)[:200] for text in pydoc_data.topics.topics.values()]
_GREEDY = SamplingParams(temperature=0.0, logprobs=True, top_n_tokens=2)
_SEEDED = replace(_GREEDY, temperature=0.8, top_k=40, repetition_penalty=1.1)


class _Outputs:
    """Tokens of each sequence, and for each of them the gap between the two best logits."""

    def __init__(self, count: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self.gaps: list[list[float]] = [[] for _ in range(count)]

    def add(self, rows: TokenRows) -> None:
        start = 0
        for row, sequence_id in enumerate(rows.sequence_ids):
            best = rows.top_logprobs[start : start + rows.top_counts[row]]
            start += rows.top_counts[row]
            self.tokens[sequence_id].append(rows.token_ids[row])
            self.gaps[sequence_id].append(best[0] - best[1])


def _run(engine: Engine, chunks: Sequence[Chunk], tokens: int, budget: DraftBudget) -> _Outputs:
    outputs = _Outputs(len(chunks))
    for chunk in chunks:
        result = engine.prefill(Prefill(chunks=[chunk]), perf_counter_ns())
        assert isinstance(result, StepResult), result
        outputs.add(result.rows)
    ids = [chunk.sequence_id for chunk in chunks]
    assert engine.begin_decode(Decode(sequence_ids=ids, max_steps=tokens, max_draft_tokens=budget.total)) is None
    while (step := engine.decode_step(ids, perf_counter_ns(), budget)) is not None:
        assert isinstance(step, StepResult), step
        outputs.add(step.rows)
    engine.filter_batch(FilterBatch(keep=[]))
    return outputs


class _Counter:
    """Runs texts in groups, without drafts and with them."""

    def __init__(self, engine: Engine, given: argparse.Namespace) -> None:
        self._engine = engine
        self._given = given
        self._most = min(engine.backend.capacity.max_draft_tokens, _SPECULATE * given.streams)
        self._source = random.Random(1)

    def count(self, *, greedy: bool) -> tuple[int, list[float]]:
        """Return how many texts are equal, and of the others the gaps at the first difference."""
        equal, gaps = 0, []
        for first in range(0, self._given.texts, self._given.streams):
            numbers = range(first, min(first + self._given.streams, self._given.texts))
            plain = self._run(numbers, [()] * len(numbers), greedy=greedy)
            drafted = self._run(numbers, [self._corrupted(output) for output in plain.tokens], greedy=greedy)
            for ours, theirs, between in zip(drafted.tokens, plain.tokens, plain.gaps, strict=True):
                places = [place for place, token in enumerate(theirs) if ours[place] != token]
                equal += not places
                gaps += [round(between[place], 3) for place in places[:1]]
        return equal, sorted(gaps)

    def _corrupted(self, output: Sequence[int]) -> list[int]:
        return [self._source.randrange(99, 999) if self._source.random() < _WRONG else token for token in output]

    def _run(self, numbers: Sequence[int], predicted: Sequence[Sequence[int]], *, greedy: bool) -> _Outputs:
        chunks = [
            self._chunk(place, number, prediction, greedy=greedy)
            for place, (number, prediction) in enumerate(zip(numbers, predicted, strict=True))
        ]
        budget = DraftBudget(self._most if predicted[0] else 0, self._given.tokens)
        return _run(self._engine, chunks, self._given.tokens, budget)

    def _chunk(self, place: int, number: int, predicted: Sequence[int], *, greedy: bool) -> Chunk:
        text = f"{number} {_TEXTS[number % len(_TEXTS)]}"
        prompt = self._engine.backend.vocabulary.tokenize(text, add_special=True, parse_special=False)
        parameters = PreparedParameters(
            sampling=_GREEDY if greedy else replace(_SEEDED, seed=number),
            prompt_length=len(prompt),
            max_length=len(prompt) + self._given.tokens,
            ignore_eos=True,
            max_draft_tokens=_SPECULATE if predicted else 0,
            prediction=tuple(predicted),
        )
        return Chunk(sequence_id=place, start=0, token_ids=prompt, last=True, setup=parameters)


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--split", action="store_true")
    parser.add_argument("--flash-attn", default="auto")
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=40)
    given = parser.parse_args()
    config = ShardConfig(
        model=given.model,
        ctx_size=256 * given.streams,
        parallel=given.streams,
        kv_layout="split" if given.split else "unified",
        flash_attn=given.flash_attn,
        threads=1,
    )
    engine = Engine(backend_loader(config)(), 1, RunStore(0), Drafting(always=True))
    for kind in ("greedy", "seeded"):
        equal, gaps = _Counter(engine, given).count(greedy=kind == "greedy")
        print(f"{kind}: {equal} of {given.texts} texts are equal; gaps at the first difference: {gaps}", flush=True)
    engine.close()


if __name__ == "__main__":
    main()
