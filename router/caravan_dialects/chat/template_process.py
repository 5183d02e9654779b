"""``python -m caravan_dialects.chat.template_process``: renders chat templates in turn, until its input ends.

Templates come with models, which come from anywhere. The sandbox of jinja2, with the functions and filters that
transformers gives templates, keeps them from running Python code, but not from computing ``'x' * 10**9`` or looping
forever. They therefore run in a guarded process: the router itself never imports this module.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.meta
import jinja2.nodes
import msgspec
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from caravan_dialects.chat.template_messages import RenderReply, RenderRequest
from caravan_dialects.guarded_child import limit_process, serve

# One model has at most two templates, one of them for tools.
_COMPILED_TEMPLATES = 8
# Limit of the address space, which includes Python and jinja2 (about 60 MB).
MEMORY_BYTES = 512 << 20
_PROBLEM_CHARACTERS = 500
_DECODER = msgspec.json.Decoder(RenderRequest)


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


def render(request: RenderRequest) -> RenderReply:
    """Render one template. Whatever it raises becomes the ``problem`` of the reply."""
    pieces: list[str] = []
    size = 0
    try:
        if request.names:
            return RenderReply(names=names_in(request.source))
        for piece in compiled(request.source).generate(usual_variables(request.variables)):
            size += len(piece.encode())
            if size > request.max_bytes:
                return RenderReply(given_bytes=size)
            pieces.append(piece)
    except MemoryError:
        return RenderReply(problem="it needs too much memory")
    except RecursionError:
        return RenderReply(problem="it is nested too deeply")
    except Exception as error:  # noqa: BLE001 - a template can raise anything that Python code can
        return RenderReply(problem=(str(error) or type(error).__name__)[:_PROBLEM_CHARACTERS])
    return RenderReply(text="".join(pieces))


if __name__ == "__main__":
    limit_process(MEMORY_BYTES)
    serve(lambda request: msgspec.json.encode(render(_DECODER.decode(request))))
