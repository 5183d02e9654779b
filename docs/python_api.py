"""Writes the signatures of the Python API to `python-api.txt`, which a test compares with the code.

Run it after a change that is meant: `.venv/bin/python docs/python_api.py`.
"""

import enum
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, is_typeddict

import caravan
import caravan.client

FILE = Path(__file__).with_name("python-api.txt")
_HEAD = """# The public names of `caravan` and `caravan.client` with their signatures.
# Written by docs/python_api.py. What may change, and how, is in docs/python.md under "What is stable".
"""
# Where a type is defined is no part of the contract.
_MODULES = re.compile(r"\b(?:[a-z_]+\.)+(?=[A-Z])")
_UNPACKED = re.compile(r"\*<class '?(\w+)'?>")
# A name of a type, but no default.
_QUOTED = re.compile(r"(?<!= )'(\w+)'")
_WIDTH = 120


def render() -> str:
    """Return the whole file."""
    return "\n".join([_HEAD, *_module(caravan), *_module(caravan.client)])


def _module(module: ModuleType) -> Iterator[str]:
    for name in sorted(module.__all__):
        if name != "__version__":
            yield from _member(f"{module.__name__}.{name}", getattr(module, name))
            yield ""


def _member(name: str, value: Any) -> Iterator[str]:
    if is_typeddict(value):
        yield f"dict {name}"
        for key, kind in sorted(value.__annotations__.items()):
            yield f"    {key}: {_plain(inspect.formatannotation(getattr(kind, '__forward_arg__', kind)))}"
        return
    bases = [base.__name__ for base in value.__bases__ if base in _public()]
    yield f"class {name}" + (f"({', '.join(bases)})" if bases else "")
    if issubclass(value, enum.Enum):
        yield from (f"    {one.name}" for one in value)
        return
    # What says "Use ..." is made by another object.
    if not issubclass(value, Exception) and not (value.__init__.__doc__ or "").startswith("Use "):
        yield from _signature("__init__", value)
    for own, member in sorted(inspect.getmembers(value)):
        if own.startswith("_") or (issubclass(value, BaseException) and hasattr(Exception, own)):
            continue
        if isinstance(member, property):
            yield f"    property {own}"
        elif inspect.isroutine(member):
            yield from _signature(own, member)


def _public() -> set[type]:
    return {
        value
        for module in (caravan, caravan.client)
        for name in module.__all__
        if isinstance(value := getattr(module, name), type)
    }


def _signature(name: str, call: Any) -> Iterator[str]:
    kind = "async def" if inspect.iscoroutinefunction(call) else "def"
    signature = _plain(str(inspect.signature(call)))
    line = f"    {kind} {name}{signature}"
    if len(line) <= _WIDTH:
        yield line
        return
    yield f"    {kind} {name}("
    mark = ""
    for parameter in inspect.signature(call).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not mark:
            mark = "*"
            yield "        *,"
        yield f"        {_plain(str(parameter))},"
    yield f"    ){signature[signature.rindex(' -> ') :]}"


def _plain(text: str) -> str:
    text = _UNPACKED.sub(r"Unpack[\1]", _MODULES.sub("", text))
    return _QUOTED.sub(r"\1", text)


if __name__ == "__main__":
    FILE.write_text(render())
