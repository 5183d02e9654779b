"""The flags of router and shard as JSON schemas, so that the chart refuses unknown flags and wrong values."""

import math
from dataclasses import fields
from typing import Any, get_args, get_origin, get_type_hints

from caravan_router.config import RouterConfig
from caravan_shard.config import ShardConfig

# The chart sets these from other values.
_OWN_ROUTER = {
    "advertise_url", "api_key", "api_keys_file", "expected_model", "graceful_termination_timeout", "handover",
    "hostname", "log_file", "metrics_key", "metrics_port", "port",
    "shard", "shard_ca_certs", "shard_certfile", "shard_grace_s", "shard_hostname", "shard_keyfile", "ssl_ca_certs",
    "ssl_certfile", "ssl_keyfile", "state_file", "state_url",
}  # fmt: skip
_OWN_SHARD = {
    "address", "alias", "allow_plaintext", "ca_certs", "cache_dir", "cache_dir_space", "certfile", "drain_timeout_s",
    "exit_with_parent", "fit_host", "health_address", "keyfile", "log_file", "model", "ready_fd", "shard_id",
}  # fmt: skip
_JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}


def with_flags(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the chart's schema with the definitions of both programs' flags as they are now."""
    flags = {"routerFlags": _flags(RouterConfig, _OWN_ROUTER), "shardFlags": _flags(ShardConfig, _OWN_SHARD)}
    return schema | {"$defs": schema["$defs"] | flags}


def _flags(config: type[Any], own: set[str]) -> dict[str, Any]:
    names = {field.name for field in fields(config)}
    assert own <= names, f"the chart sets flags that are gone: {own - names}"
    hints = get_type_hints(config)
    properties = {
        field.name.replace("_", "-"): _value(hints[field.name], field.metadata["flag"])
        for field in fields(config)
        if field.name not in own
    }
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _value(annotation: Any, flag: Any) -> dict[str, Any]:
    if get_origin(annotation) is tuple:
        return {"type": "array", "items": {"type": "string"}}
    kinds = [kind for kind in get_args(annotation) or (annotation,) if kind is not type(None)]
    schema: dict[str, Any] = {"type": _JSON_TYPES[kinds[0]]}
    if flag.choices:
        schema["enum"] = list(flag.choices)
    if math.isfinite(flag.low):
        schema["minimum"] = flag.low
    if math.isfinite(flag.high):
        schema["maximum"] = flag.high
    return schema
