"""The sandboxed jinja2 environment of chat templates, with the functions and filters that transformers gives them.

Only the rendering process imports this module: the router itself never runs a template.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.meta
import jinja2.nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# One model has at most two templates, one of them for tools.
_COMPILED_TEMPLATES = 8


class GenerationTag(Extension):
    """Renders the content of ``{% generation %}``, which marks the model's own text for training, without the tag."""

    tags = {"generation"}  # noqa: RUF012 - an attribute of the base class, which is never changed

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        """Return the nodes between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    # Local time, as in transformers: the model gets the date of the server's place.
    return datetime.now().astimezone().strftime(layout)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes characters for HTML, which no model has seen in training.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


_ENVIRONMENT = _environment()


def usual_variables(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``given`` with those variables that llama.cpp sets for every template.

    ``date_string``, ``datetime``: today. ``functions``: the tools as text.
    """
    tools = given.get("tools")
    return {
        "date_string": _strftime_now("%d %b %Y"),
        "datetime": _strftime_now("%b %d %Y"),
        "functions": _tojson(tools, indent=2) if tools else "",
        **given,
    }


def names_in(source: str) -> list[str]:
    """Return the names of the variables that a template reads, but for the functions that every template has."""
    return sorted(jinja2.meta.find_undeclared_variables(_ENVIRONMENT.parse(source)) - _ENVIRONMENT.globals.keys())


@lru_cache(_COMPILED_TEMPLATES)
def compiled(source: str) -> jinja2.Template:
    """Return the compiled template, cached by source. Raises whatever the compiler does with a wrong source."""
    return _ENVIRONMENT.from_string(source)
