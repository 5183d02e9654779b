"""A router without keys says so in its log where other hosts reach it."""

import pytest

from caravan_router.config import RouterConfig

KEYS = {"api_keys_file": "keys.toml"}
CERTIFICATES = {"ssl_certfile": "c", "ssl_keyfile": "k", "ssl_ca_certs": "a"}


@pytest.mark.parametrize(
    ("hostname", "files", "expected"),
    [
        ("0.0.0.0", {}, True),
        ("::", {}, True),
        ("10.0.0.5", {}, True),
        ("router.example", {}, True),
        ("127.0.0.1", {}, False),
        ("::1", {}, False),
        ("localhost", {}, False),
        ("0.0.0.0", KEYS, False),
        ("0.0.0.0", CERTIFICATES, False),
    ],
)
def test_who_needs_a_warning(hostname: str, files: dict[str, str], expected: bool) -> None:
    config = RouterConfig(shard=("a:1",), hostname=hostname, **files)  # type: ignore[arg-type]
    assert config.is_open_to_strangers is expected
