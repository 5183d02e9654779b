"""The jinja2 environment that chat templates are written for: what transformers gives them, in the sandbox.

Imported by the rendering process alone: the router itself never runs a template.
"""

import json
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Templates of one model: with and without tools.
_COMPILED_TEMPLATES = 8


class GenerationTag(Extension):
    """``{% generation %}`` marks what a model wrote, for training. Here its content is all that counts."""

    tags = {"generation"}  # noqa: RUF012 - the attribute of the base class, which is never changed

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        """The nodes between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    # Local time, as transformers has it: a model is told the date where the server is.
    return datetime.now().astimezone().strftime(layout)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own escapes what HTML could misread, which no model has seen in training.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


_ENVIRONMENT = _environment()


@lru_cache(_COMPILED_TEMPLATES)
def compiled(source: str) -> jinja2.Template:
    """Once for each source. Raises jinja2.TemplateSyntaxError and whatever else a source can break."""
    return _ENVIRONMENT.from_string(source)
