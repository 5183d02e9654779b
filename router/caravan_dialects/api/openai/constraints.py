"""Finds the one constraint among the fields in which clients of ``/v1`` write them."""

from collections.abc import Iterator

from caravan_dialects.api.generation.constraints import ConstraintReader, FieldConstraint
from caravan_dialects.api.generation.rules import invalid_grammar_error
from caravan_dialects.api.limits import Limits
from caravan_dialects.api.openai.rules import two_constraints_error
from caravan_dialects.api.openai.schema import ConstraintFields, StructuredOutputs


def constraint_of(
    fields: ConstraintFields, limits: Limits, response_format: str = "response_format"
) -> FieldConstraint | None:
    """Return the constraint of a request, None if it has none. Raises ValidationError, also for two constraints.

    ``response_format``: what the client calls the field of this name.
    """
    found = list(_constraints(fields, ConstraintReader(limits), response_format))
    if len(found) > 1:
        raise two_constraints_error(found[0].field, found[1].field)
    return found[0] if found else None


def _constraints(fields: ConstraintFields, reader: ConstraintReader, name: str) -> Iterator[FieldConstraint]:
    if (constraint := reader.response_format(name, fields.response_format)) is not None:
        yield constraint
    guided = StructuredOutputs(
        json=fields.guided_json,
        regex=fields.guided_regex,
        choice=fields.guided_choice,
        grammar=fields.guided_grammar,
    )
    yield from _vllm("guided_", guided, reader)
    if fields.structured_outputs is not None:
        structured = list(_vllm("structured_outputs.", fields.structured_outputs, reader))
        if not structured:
            raise invalid_grammar_error("structured_outputs", "it must have one of its fields")
        yield from structured
    if fields.json_schema is not None:
        yield reader.schema("json_schema", fields.json_schema)
    # llama-server's clients write "" for no grammar.
    if fields.grammar:
        yield reader.grammar("grammar", fields.grammar)


def _vllm(prefix: str, outputs: StructuredOutputs, reader: ConstraintReader) -> Iterator[FieldConstraint]:
    """Read vLLM's fields, whose names start with ``prefix``."""
    if outputs.json is not None:
        yield reader.schema(f"{prefix}json", outputs.json)
    if outputs.json_object:
        yield reader.any_object(f"{prefix}json_object")
    if outputs.regex is not None:
        yield reader.regex(f"{prefix}regex", outputs.regex)
    if outputs.choice is not None:
        yield reader.choice(f"{prefix}choice", outputs.choice)
    if outputs.grammar is not None:
        yield reader.grammar(f"{prefix}grammar", outputs.grammar)
