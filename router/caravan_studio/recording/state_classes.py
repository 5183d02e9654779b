"""The classes of which the state of a scheduler is made, and what a recording must not tell of their fields."""

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from enum import Enum
from types import MappingProxyType, ModuleType
from typing import Any

import caravan_proto.messages
import caravan_scheduler

# Fields that hold tokens, as one number, or any number of them; or as the keys of a dictionary.
TOKENS = frozenset(
    {
        ("GenerationSpec", "prompt"),
        ("GenerationSpec", "prediction"),
        ("StoppingParams", "stop_token_ids"),
        ("BeamSearch", "eos_token_ids"),
        ("Sequence", "output"),
        ("ShardLimits", "end_tokens"),
        ("Checkpoints", "_end_tokens"),
        ("RunNote", "tokens"),
        ("Pin", "tokens"),
        ("_Node", "tokens"),
        ("Chunk", "token_ids"),
        ("Row", "token_ids"),
        ("Row", "score_token_ids"),
        ("LoadEntry", "token_ids"),
        ("GeneratedToken", "token_id"),
        ("Alternative", "token_id"),
    }
)
TOKEN_KEYS = frozenset({("_Node", "children")})
# Fields that hold the id of a medium, or the fingerprint of an encoder; or have such ids as keys.
MEDIA = frozenset(
    {("MediaSpan", "media_id"), ("Encoding", "media_id"), ("PromptMedia", "encoder"), ("ShardLimits", "encoder")}
)
MEDIA_KEYS = frozenset({("ShardMedia", "_encoded"), ("Encodings", "_lost")})
# A field that has media by their ids, of which nothing else is told.
CONTENTS = frozenset({("PromptMedia", "contents")})
# Fields that hold the name of an API key, or have such names as keys.
TENANTS = frozenset({("Tenant", "name"), ("RunNote", "tenant"), ("Pin", "tenant")})
TENANT_KEYS = frozenset({("FairShare", "_counters"), ("SchedulerState", "_tenants")})
# A field that has namespaces with their adapters as keys.
NAMESPACE_KEYS = frozenset({("PrefixTree", "_roots")})
# Fields with hashes of prefixes, which differ from process to process: as a tuple, or as keys.
HASHES = frozenset({("PrefixChange", "prefix_hashes"), ("Resident", "prefix_hashes")})
HASH_KEYS = frozenset({("PrefixIndex", "_counts"), ("KnownLogprobs", "_by_prefix")})
# What is not needed, or is found again: a field has this value instead.
LEFT_OUT: Mapping[tuple[str, str], object] = MappingProxyType(
    {
        ("GenerationSpec", "request_id"): "",
        ("GenerationSpec", "traceparent"): "",
        ("GenerationSpec", "constraint"): None,
        ("GenerationSpec", "thought"): None,
        ("SamplingParams", "biases"): (),
        ("Chunk", "setup"): None,
        ("GeneratedToken", "piece"): b"",
        ("Alternative", "piece"): b"",
        ("Pin", "namespace"): None,
        ("Sequence", "_prefix_hashes"): [],
        ("Sequence", "_prompt_hashes"): None,
    }
)


def _modules(package: ModuleType) -> Iterator[ModuleType]:
    yield package
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        yield importlib.import_module(found.name)


def _classes() -> dict[str, type[Any]]:
    modules = [
        *_modules(caravan_scheduler),
        *_modules(caravan_proto.messages),
    ]
    found: dict[str, type[Any]] = {}
    for module in modules:
        for name, kind in vars(module).items():
            if isinstance(kind, type) and kind.__module__ == module.__name__ and not issubclass(kind, BaseException):
                found[f"{module.__name__.rpartition('.')[2]}.{name}"] = kind
    return found


CLASSES: Mapping[str, type[Any]] = MappingProxyType(_classes())
"""By the last part of their module's name and their own. Nothing else can be in a state that is read."""

NAMES: Mapping[type[Any], str] = MappingProxyType({kind: name for name, kind in CLASSES.items()})


def is_enum(kind: type[Any]) -> bool:
    """Whether a class has members, which are told by name."""
    return issubclass(kind, Enum)


def is_named_tuple(kind: type[Any]) -> bool:
    """Whether a class is a tuple with names."""
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def fields_of(value: object) -> list[str]:
    """Return the names of the fields that an object has."""
    kind = type(value)
    slots = [vars(one).get("__slots__", ()) for one in kind.__mro__]
    names = [name for one in slots for name in ((one,) if isinstance(one, str) else one)]
    names += list(getattr(value, "__dict__", {}))
    return [name for name in dict.fromkeys(names) if not name.startswith("__") and hasattr(value, name)]
