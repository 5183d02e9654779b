"""Flags of the router that contradict each other or open it to strangers."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from caravan_dialects.conversations.database import StateFileError
from caravan_dialects.conversations.store import Store, StoreSettings
from caravan_router.cli import startup_problem
from caravan_router.config import RouterConfig

KEYS = {"api_keys_file": "keys.toml"}
CERTIFICATES = {"ssl_certfile": "c", "ssl_keyfile": "k", "ssl_ca_certs": "a"}


def test_variables_and_a_budget_are_limits_of_requests() -> None:
    config = RouterConfig(
        chat_template_kwargs='{"enable_thinking": false, "n": [1]}', reasoning_budget=7, reasoning_effort="low"
    )
    assert config.limits.chat_template_kwargs == {"enable_thinking": False, "n": [1]}
    assert (config.limits.reasoning_budget, config.limits.reasoning_effort) == (7, "low")
    assert replace(config, reasoning_budget=-1).limits.reasoning_budget is None
    assert RouterConfig().limits.chat_template_kwargs == {}


def test_an_effort_is_said_once() -> None:
    with pytest.raises(ValueError, match="--reasoning-effort"):
        RouterConfig(chat_template_kwargs='{"reasoning_effort": "low"}', reasoning_effort="high")


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"messages": []}', '{"enable_thinking": 1}', '{"a": "%s"}' % ("x" * 70000)]
)
def test_variables_that_cannot_be_are_refused_by_the_flags_name(text: str) -> None:
    with pytest.raises(ValueError, match="--chat-template-kwargs"):
        RouterConfig(chat_template_kwargs=text)


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


URL = "postgresql://user:secret@host/name"


def test_a_file_keeps_what_it_has_for_longer_than_memory() -> None:
    assert RouterConfig().store == StoreSettings(place=None, max_bytes=256 << 20, life_s=3600)
    with_file = RouterConfig(state_file="state", state_space=1).store
    assert with_file == StoreSettings(place=Path("state"), max_bytes=1 << 20, life_s=30 * 24 * 3600)
    assert RouterConfig(state_file="state", state_life_s=5).store.life_s == 5
    with_database = RouterConfig(state_url=URL)
    assert (with_database.store.place, with_database.bulk.place) == (URL, URL)
    assert with_database.store.life_s == with_file.life_s
    assert URL not in repr(with_database)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"state_url": URL, "state_file": "state"}, "--state-file and --state-url exclude each other"),
        ({"state_url": "mysql://host/name"}, "--state-url must begin with postgresql://"),
    ],
)
def test_a_wrong_url_of_a_database_is_refused(flags: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RouterConfig(**flags)  # type: ignore[arg-type]


async def test_a_database_that_cannot_be_reached_is_found_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RouterConfig(state_url=f"postgresql:///name?host={tmp_path}")
    for message in ("No such file or directory", "needs packages that are not installed: pip install 'psycopg"):
        store = Store(config.store)
        with pytest.raises(StateFileError) as caught:
            await store.open()
        problem = startup_problem(config, caught.value)
        assert problem.startswith("--state-url: ")
        assert message in problem
        await store.close()
        monkeypatch.setitem(sys.modules, "psycopg", None)


async def test_a_broken_file_is_found_at_the_start(tmp_path: Path) -> None:
    store = Store(StoreSettings(place=tmp_path / "missing" / "state"))
    with pytest.raises(StateFileError) as caught:
        await store.open()
    assert startup_problem(RouterConfig(), caught.value).startswith("--state-file: ")
    await store.close()


def test_trusted_proxies_are_networks() -> None:
    config = RouterConfig(trusted_proxies=("10.1.2.3", "fd00::/8"))
    assert [str(network) for network in config.proxies] == ["10.1.2.3/32", "fd00::/8"]
    with pytest.raises(ValueError, match=r"--trusted-proxies: 10\.0\.0\.1/8 has host bits set"):
        RouterConfig(trusted_proxies=("10.0.0.1/8",))
