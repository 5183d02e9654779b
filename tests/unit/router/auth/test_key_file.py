"""The key file, and the keys that `caravan key` makes for it."""

import pytest

from caravan_dialects.auth.key import ApiKey, digest_of
from caravan_router.auth.key_file import KeyFileError, main, parse_keys
from caravan_scheduler.core.generation import Tenant

A, B = digest_of("a").hex(), digest_of("b").hex()


def entry(**fields: object) -> str:
    values = {"name": "a", "sha256": A} | fields
    lines = [f"{field} = {_toml(value)}" for field, value in values.items()]
    return "\n".join(["[[keys]]", *lines, ""])


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, str) else str(value)


def test_every_field_of_an_entry_is_read() -> None:
    limits = {"requests_per_minute": 60, "concurrent_requests": 8, "tokens_per_day": 90, "tokens_per_month": 900}
    first = entry(weight=2, max_priority=-5, operator=True, **limits)
    text = first + entry(name="b", sha256=B)
    assert parse_keys(text) == (
        ApiKey(
            digest=digest_of("a"),
            tenant=Tenant(name="a", weight=2.0),
            max_priority=-5,
            **limits,
            operator=True,
        ),
        ApiKey(digest=digest_of("b"), tenant=Tenant(name="b")),
    )


def test_the_digest_may_have_upper_case_digits() -> None:
    assert parse_keys(entry(sha256=A.upper()))[0].digest == digest_of("a")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[keys]", "Expected ']]'"),
        ("", "missing required field `keys`"),
        ("keys = []", "no [[keys]] entry"),
        ("[[keys]]\nname = 'a'", "missing required field `sha256` - at `$.keys[0]`"),
        (entry(limit=1), "unknown field `limit` - at `$.keys[0]`"),
        (entry() + "[other]\n", "unknown field `other`"),
        (entry(requests_per_minute=1.5), "Expected `int | null`, got `float` - at `$.keys[0].requests_per_minute`"),
        (entry(operator="yes"), "Expected `bool`, got `str` - at `$.keys[0].operator`"),
        (entry(name=""), "keys[0].name must have 1 to 64"),
        (entry(name="a b"), "Given: 'a b'"),
        (entry(name="-a"), "begin with a letter or digit"),
        (entry(sha256="secret-of-alice"), "keys[0].sha256 must be 64 hex digits, the SHA-256 of the key. Given: 15"),
        (entry(weight=0), "keys[0].weight must be > 0 and <= 1000. Given: 0.0"),
        (entry(weight="inf"), "Expected `float`, got `str`"),
        ("[[keys]]\nname='a'\nsha256='" + A + "'\nweight=nan", "keys[0].weight must be > 0 and <= 1000. Given: nan"),
        (entry(max_priority=101), "keys[0].max_priority must be >= -100 and <= 100. Given: 101"),
        (
            entry(requests_per_minute=0),
            "keys[0].requests_per_minute must be >= 1 and <= 1000000, or left out for no limit. Given: 0",
        ),
        ("keys = " + "[" * 10_000, "recursion"),
        (entry(concurrent_requests=10**400), "keys[0].concurrent_requests must be >= 1 and <= 1000000"),
        (entry(concurrent_requests=-1), "keys[0].concurrent_requests must be >= 1"),
        (entry(tokens_per_day=0), "keys[0].tokens_per_day must be >= 1 and <= 1000000000000000, or left out"),
        (entry() + entry(sha256=B), "keys[1].name is that of keys[0] already. Given: a"),
        (entry() + entry(name="b", sha256=A.upper()), "keys[1].sha256 is that of keys[0] already"),
    ],
)
def test_an_invalid_file_is_refused_with_a_message_that_names_the_field(text: str, message: str) -> None:
    with pytest.raises(KeyFileError) as caught:
        parse_keys(text)
    assert message in str(caught.value)
    assert "secret-of-alice" not in str(caught.value)


def test_the_printed_entry_holds_the_digest_of_the_printed_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["alice"]) == 0
    out, err = capsys.readouterr()
    secret = err.strip().rpartition(" ")[2]
    [key] = parse_keys(out)
    assert (key.tenant.name, key.digest) == ("alice", digest_of(secret))
    assert not key.operator
    assert len(secret) >= 43
    assert secret not in out


def test_the_key_of_an_operator(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["olga", "--operator"]) == 0
    [key] = parse_keys(capsys.readouterr().out)
    assert key.operator


def test_every_new_key_is_different(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["a"]) == main(["b"]) == 0
    first, second = parse_keys(capsys.readouterr().out)
    assert first.digest != second.digest


@pytest.mark.parametrize("name", ["", "a b", 'a"'])
def test_a_name_that_the_key_file_would_refuse_is_an_error(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([name])
    assert stop.value.code == 2
    assert "NAME must have 1 to 64" in capsys.readouterr().err
