"""Reads the key file, which is TOML. One wrong entry refuses the whole file.

[[keys]]
name = "alice"
sha256 = "2bd806c97f0e00af1a1fc3328fa763a9269723c8db8fac4f93af71db186d6e90"
weight = 2.0
max_priority = 10
requests_per_minute = 60
concurrent_requests = 8
tokens_per_day = 1000000
tokens_per_month = 20000000
operator = false
"""

import re
import secrets
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from caravan_dialects.auth.key import MAX_PRIORITY, MIN_PRIORITY, ApiKey, digest_of
from caravan_proto.command_line import Parser
from caravan_scheduler.core.generation import Tenant

# The name is also the tenant's and appears in the log.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SHA256 = re.compile(r"[0-9A-Fa-f]{64}")
MAX_WEIGHT = 1000.0
MAX_LIMIT = 1_000_000
MAX_TOKENS = 10**15


class KeyFileError(Exception):
    """The key file cannot be read, or an entry is invalid."""


class _Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    sha256: str
    weight: float = 1.0
    max_priority: int = 0
    requests_per_minute: int | None = None
    concurrent_requests: int | None = None
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None
    operator: bool = False


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    keys: list[_Entry]


def read_key_file(path: Path) -> tuple[ApiKey, ...]:
    """Read the file; blocks. Raises KeyFileError, which names the file and the problem."""
    try:
        return parse_keys(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise KeyFileError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise KeyFileError(f"{path}: not UTF-8") from error
    except KeyFileError as error:
        raise KeyFileError(f"{path}: {error}") from error


def parse_keys(text: str) -> tuple[ApiKey, ...]:
    """Return at least one key; no two have the same name or digest. Raises KeyFileError."""
    try:
        entries = msgspec.convert(tomllib.loads(text), _File).keys
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, RecursionError) as error:
        raise KeyFileError(str(error)) from error
    if not entries:
        raise KeyFileError("it has no [[keys]] entry, so no request could be allowed")
    keys = tuple(_key(f"keys[{index}]", entry) for index, entry in enumerate(entries))
    _check_distinct("name", [entry.name for entry in entries])
    _check_distinct("sha256", [entry.sha256.lower() for entry in entries])
    return keys


def check_name(field: str, name: str) -> None:
    """Raise KeyFileError unless ``name`` can be the name of a key."""
    if not _NAME.fullmatch(name):
        rule = "must have 1 to 64 letters of ASCII, digits, `.`, `_` or `-`, and begin with a letter or digit"
        raise KeyFileError(f"{field} {rule}. Given: {name!r:.80}")


def _key(where: str, entry: _Entry) -> ApiKey:
    check_name(f"{where}.name", entry.name)
    if not _SHA256.fullmatch(entry.sha256):
        # The given value is not shown, because it may be the key itself.
        given = f"{len(entry.sha256)} characters"
        raise KeyFileError(f"{where}.sha256 must be 64 hex digits, the SHA-256 of the key. Given: {given}")
    if not 0 < entry.weight <= MAX_WEIGHT:
        raise KeyFileError(f"{where}.weight must be > 0 and <= {MAX_WEIGHT:g}. Given: {entry.weight}")
    if not MIN_PRIORITY <= entry.max_priority <= MAX_PRIORITY:
        raise KeyFileError(
            f"{where}.max_priority must be >= {MIN_PRIORITY} and <= {MAX_PRIORITY}. Given: {entry.max_priority}"
        )
    for field, limit, most in (
        ("requests_per_minute", entry.requests_per_minute, MAX_LIMIT),
        ("concurrent_requests", entry.concurrent_requests, MAX_LIMIT),
        ("tokens_per_day", entry.tokens_per_day, MAX_TOKENS),
        ("tokens_per_month", entry.tokens_per_month, MAX_TOKENS),
    ):
        if limit is not None and not 1 <= limit <= most:
            rule = f"must be >= 1 and <= {most}, or left out for no limit"
            raise KeyFileError(f"{where}.{field} {rule}. Given: {limit}")
    return ApiKey(
        digest=bytes.fromhex(entry.sha256),
        tenant=Tenant(name=entry.name, weight=entry.weight),
        max_priority=entry.max_priority,
        requests_per_minute=entry.requests_per_minute,
        concurrent_requests=entry.concurrent_requests,
        tokens_per_day=entry.tokens_per_day,
        tokens_per_month=entry.tokens_per_month,
        operator=entry.operator,
    )


def _check_distinct(field: str, values: list[str]) -> None:
    for index, value in enumerate(values):
        if (first := values.index(value)) != index:
            raise KeyFileError(f"keys[{index}].{field} is that of keys[{first}] already. Given: {value}")


def key_parser() -> Parser:
    """Return the parser of `caravan key`."""
    parser = Parser(prog="caravan key", description="Make an API key.")
    parser.add_argument("name", help="name of the key's owner, for the log and as tenant of its requests")
    parser.add_argument("--operator", action="store_true", help="allow the routes under /admin")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print the key to stderr and its entry to stdout, so that ``caravan key alice >> keys.toml`` stores no secret."""
    parser = key_parser()
    arguments = parser.parse_args(argv)
    name: str = arguments.name
    try:
        check_name("NAME", name)
    except KeyFileError as error:
        parser.error(str(error))
    secret = secrets.token_urlsafe(32)
    sys.stderr.write(f"The key, shown only now: {secret}\n")
    sys.stderr.flush()
    operator = "operator = true\n" if arguments.operator else ""
    sys.stdout.write(f'\n[[keys]]\nname = "{name}"\nsha256 = "{digest_of(secret).hex()}"\n{operator}')
    return 0
