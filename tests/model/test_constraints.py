"""Constrained outputs of the real models: every output parses, matches and ends.

With every commit, the demo model has four random schemas. The environment variable CARAVAN_TEST_SCHEMAS sets the number
of those that are slow tests (500 take some minutes).
"""

import json
import os
import re
from collections.abc import Iterator, Sequence

import jsonschema
import pytest

from caravan_proto.messages.constraint import Constraint, ConstraintKind
from caravan_proto.messages.results import FinishReason
from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.backends.llama.backend import LlamaCppBackend
from caravan_shard.config import ShardConfig
from caravan_shard.engine.engine import Engine
from caravan_shard.sequences.runs import RunStore
from caravan_testing.random_schemas import random_schema
from caravan_testing.shard_builders import Grammars, Job, Output, run_jobs
from caravan_testing.shard_models import DEMO_MODEL, WINDOW_MODEL, fetched

pytestmark = [pytest.mark.model, pytest.mark.timeout(1800)]

SCHEMAS = int(os.environ.get("CARAVAN_TEST_SCHEMAS", "16"))
SLOTS = 8
MAX_NEW = 400
DRAWS = 4
PROMPT = "<|im_start|>user\nGive me an example as JSON.<|im_end|>\n<|im_start|>assistant\n"


class ConstrainedModel:
    """A model that answers a prompt under constraints."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._grammars = Grammars(engine.backend)

    def answer(self, constraints: Sequence[Constraint], draw: int = 0) -> list[Output]:
        """One output each, drawn; other ones for another ``draw``. The penalty keeps small models from saying one digit
        for ever.
        """
        tokens = self._engine.backend.vocabulary.tokenize(PROMPT, add_special=True, parse_special=True)
        jobs = [
            Job(
                tokens,
                self._grammars.compile(constraint),
                SamplingParams(temperature=1.0, frequency_penalty=0.3, seed=seed + 10_000 * draw),
            )
            for seed, constraint in enumerate(constraints)
        ]
        return run_jobs(self._engine, jobs, slots=SLOTS, max_new=MAX_NEW)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(DEMO_MODEL, id="demo"),
        pytest.param(WINDOW_MODEL, id="large-vocabulary", marks=pytest.mark.slow),
    ],
)
def model(request: pytest.FixtureRequest) -> Iterator[ConstrainedModel]:
    """The demo model, then Gemma, whose vocabulary has 262,144 tokens."""
    config = ShardConfig(model=str(fetched(request.param)), ctx_size=8192, parallel=SLOTS, threads=1, flash_attn="on")
    engine = Engine(LlamaCppBackend(config), 1, RunStore(0))
    yield ConstrainedModel(engine)
    engine.close()


@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("model", [DEMO_MODEL], indirect=True, ids=["demo"])
@pytest.mark.parametrize("count", [4, pytest.param(SCHEMAS, marks=pytest.mark.slow)], ids=["few", "many"])
def test_outputs_for_random_schemas_parse_and_validate(model: ConstrainedModel, count: int) -> None:
    schemas = [random_schema(seed) for seed in range(count)]
    constraints = [Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema)) for schema in schemas]
    outputs = model.answer(constraints)
    # A number may have any number of digits, and a small model may never end it: draw again.
    for draw in range(1, DRAWS):
        cut = [index for index, output in enumerate(outputs) if output.finish is FinishReason.LENGTH]
        for index, output in zip(cut, model.answer([constraints[index] for index in cut], draw), strict=True):
            outputs[index] = output
    for seed, (schema, output) in enumerate(zip(schemas, outputs, strict=True)):
        where = f"schema {seed}, {schema}: {output}"
        assert output.finish is FinishReason.EOS_TOKEN, where
        try:
            value = json.loads(output.data.decode())
            jsonschema.validate(
                value, schema, jsonschema.Draft202012Validator, format_checker=jsonschema.FormatChecker()
            )
        except (ValueError, jsonschema.ValidationError) as error:
            pytest.fail(f"{where}: {error}")


def test_outputs_match_every_kind_of_constraint(model: ConstrainedModel) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}}, "required": ["name"]}
    constraints = [
        Constraint(ConstraintKind.REGEX, r"The answer is (yes|no|[0-9]{1,4})\."),
        Constraint(ConstraintKind.REGEX, "(red|dark green|blau 🎈)"),
        Constraint(ConstraintKind.LARK, 'start: pair ("," pair){1,2}\npair: /[a-z]{2,5}/ "=" /[0-9]{1,3}/'),
        Constraint(ConstraintKind.GBNF, 'root ::= "<" name ">" [0-9]{1,4} "</" name ">"\nname ::= [A-Z]{1,6}'),
        Constraint(ConstraintKind.JSON_SCHEMA, json.dumps({**schema, "additionalProperties": False})),
    ]
    outputs = model.answer(constraints)
    texts = [output.data.decode() for output in outputs]
    pair = "[a-z]{2,5}=[0-9]{1,3}"
    assert re.fullmatch(r"The answer is (yes|no|[0-9]{1,4})\.", texts[0])
    assert texts[1] in ("red", "dark green", "blau 🎈")
    assert re.fullmatch(f"{pair}(,{pair}){{1,2}}", texts[2])
    assert re.fullmatch("<[A-Z]{1,6}>[0-9]{1,4}</[A-Z]{1,6}>", texts[3])
    assert set(json.loads(texts[4])) == {"name"}
    assert {output.finish for output in outputs} == {FinishReason.EOS_TOKEN}
