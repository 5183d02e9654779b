"""Random schemas on a model that outputs anything: every output parses, matches and ends."""

import json

import jsonschema

from caravan_proto.messages.constraint import Constraint, ConstraintKind
from caravan_proto.messages.results import FinishReason
from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.backends.toy.backend import ToyBackend
from caravan_shard.engine.engine import Engine
from caravan_shard.sequences.runs import RunStore
from caravan_testing.random_schemas import random_schema
from caravan_testing.shard_builders import Grammars, Job, run_jobs

SCHEMAS = 500


def test_outputs_for_random_schemas_parse_and_validate() -> None:
    engine = Engine(ToyBackend(cells=65_536), 1, RunStore(0))
    grammars = Grammars(engine.backend)
    schemas = [random_schema(seed) for seed in range(SCHEMAS)]
    jobs = [
        Job(
            list(f"prompt {seed}".encode()),
            grammars.compile(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))),
            # The penalty ends numbers, which may have any number of digits.
            SamplingParams(temperature=1.0, frequency_penalty=0.3, seed=seed),
        )
        for seed, schema in enumerate(schemas)
    ]
    outputs = run_jobs(engine, jobs, slots=8, max_new=3_000)
    engine.close()
    for schema, output in zip(schemas, outputs, strict=True):
        assert output.finish is FinishReason.EOS_TOKEN, (schema, output)
        value = json.loads(output.data.decode())
        jsonschema.validate(value, schema, jsonschema.Draft202012Validator, format_checker=jsonschema.FormatChecker())
