"""What sequences decode while drafts are measured: prompts that they copy from, and prompts that they do not."""

import colorsys
import fnmatch
import inspect
import json
import pydoc_data.topics
import random
import shlex
import statistics
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from caravan_proto.messages.constraint import Constraint, ConstraintKind
from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.backends.base import Backend
from caravan_shard.constraints.grammar import Grammar
from caravan_testing.constrained_runs import Grammars

_GREEDY = SamplingParams(temperature=0.0)
_QUESTIONS = (
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper.",
    "Explain how a bicycle stays upright.",
    "Give me three ideas for a birthday party.",
    "What is the difference between a list and a tuple?",
    "Describe your favourite season.",
    "How do I cook rice?",
    "Plan a day in a small town by the sea.",
)
# Functions of the standard library, each with a name in it that is to be replaced.
_FUNCTIONS: tuple[tuple[Callable[..., Any], str], ...] = (
    (colorsys.rgb_to_hls, "rangec"),
    (textwrap.indent, "predicate"),
    (fnmatch.filter, "normcase"),
    (shlex.join, "split_command"),
    (statistics.fmean, "weights"),
    (colorsys.rgb_to_hsv, "maxc"),
    (colorsys.hls_to_rgb, "m1"),
    (textwrap.shorten, "placeholder"),
)
# So many letters of the output are in the prompt. Small models copy only what they have begun to copy.
_BEGUN = 150
_NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gail", "Hugo")
_CITIES = ("Lisbon", "Prague", "Turin", "Vienna")
_RECORD = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 100, "maximum": 999},
        "name": {"type": "string", "maxLength": 12},
        "city": {"type": "string", "maxLength": 12},
        "is_active": {"type": "boolean"},
        "balance_in_cents": {"type": "integer", "minimum": 0, "maximum": 99_999},
    },
    "required": ["id", "name", "city", "is_active", "balance_in_cents"],
    "additionalProperties": False,
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A prompt, how its tokens are chosen, and what its client predicts."""

    prompt: Sequence[int]
    sampling: SamplingParams
    grammar: Grammar | None = None
    predicted: tuple[int, ...] = ()


class Workloads:
    """Makes the jobs of each workload."""

    def __init__(self, backend: Backend) -> None:
        self._vocabulary = backend.vocabulary
        self._grammars = Grammars(backend)

    def chat(self, streams: int) -> list[Job]:
        """Return sampled answers to questions, which seldom repeat anything."""
        sampling = [SamplingParams(temperature=0.8, seed=number) for number in range(streams)]
        return [self._job(_QUESTIONS[number % 8], one) for number, one in enumerate(sampling)]

    def quote(self, streams: int, letters: int = 1200) -> list[Job]:
        """Return texts that are to be repeated word by word."""
        texts = [str(text)[:letters] for text in pydoc_data.topics.topics.values()]
        return [self._job(f"Repeat this text word by word:\n\n{text}", reply=text[:_BEGUN]) for text in texts[:streams]]

    def edit(self, streams: int) -> list[Job]:
        """Return functions in which a name is to be replaced."""
        jobs = []
        for number in range(streams):
            function, name = _FUNCTIONS[number % len(_FUNCTIONS)]
            source = inspect.getsource(function)
            request = f"Rename `{name}` to `other_{name}` in this function, and print the whole function:\n\n"
            signature, _, _ = source.partition("\n")
            jobs.append(self._job(f"{request}```python\n{source}```", reply=f"```python\n{signature}\n"))
        return jobs

    def json(self, streams: int) -> list[Job]:
        """Return records that are to be printed again with one change, with their JSON schema as the constraint."""
        jobs = []
        for number in range(streams):
            source = random.Random(number)
            records = [
                {
                    "id": source.randrange(100, 1000),
                    "name": name,
                    "city": source.choice(_CITIES),
                    "is_active": source.random() < 0.5,
                    "balance_in_cents": source.randrange(100_000),
                }
                for name in source.sample(_NAMES, 5)
            ]
            changed = records[2]["name"]
            request = f"Print these records as JSON again, but set the city of {changed} to Oslo:\n\n"
            schema = {"type": "array", "items": _RECORD, "minItems": len(records), "maxItems": len(records)}
            constraint = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))
            jobs.append(self._job(request + json.dumps(records), grammar=self._grammars.compile(constraint)))
        return jobs

    def copier(self, streams: int) -> list[Job]:
        """Return one long text to be repeated, among answers to questions."""
        return [*self.quote(1, letters=2400), *self.chat(streams)[1:]]

    def _job(
        self, request: str, sampling: SamplingParams = _GREEDY, *, grammar: Grammar | None = None, reply: str = ""
    ) -> Job:
        """``reply``: how the output begins."""
        prompt = f"<|im_start|>user\n{request}<|im_end|>\n<|im_start|>assistant\n{reply}"
        tokens = self._vocabulary.tokenize(prompt, add_special=True, parse_special=True)
        return Job(prompt=tokens, sampling=sampling, grammar=grammar)
