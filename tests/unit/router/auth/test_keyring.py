from dataclasses import replace

from caravan_router.auth.key import ApiKey, digest_of
from caravan_router.auth.keyring import Keyring
from caravan_router.core.tenant import Tenant

A = ApiKey(digest=digest_of("a"), tenant=Tenant(name="a"), requests_per_minute=1, concurrent_requests=2)
B = ApiKey(digest=digest_of("b"), tenant=Tenant(name="b"))


def test_a_key_is_found_by_what_it_is() -> None:
    keyring = Keyring([A, B], 0.0)
    for secret, key in (("a", A), ("b", B)):
        client = keyring.find(secret)
        assert client is not None
        assert client.key is key
    assert keyring.find("") is None
    assert keyring.find(A.digest.hex()) is None
    assert keyring.find("\udcff") is None


def test_no_limits_unless_given() -> None:
    client = Keyring([B], 0.0).find("b")
    assert client is not None
    assert not any(client.take_request(0.0) for _ in range(1000))
    assert client.permits.can_take(10**9)


def test_what_was_used_stays_used_when_the_file_is_read_again() -> None:
    keyring = Keyring([A], 0.0)
    client = keyring.find("a")
    assert client is not None
    assert client.take_request(0.0) == 0.0
    with client.permits.take(2):
        # A new secret for the same name, and a lower limit.
        keyring.replace([replace(A, digest=digest_of("new"), concurrent_requests=1), B], 0.0)
        assert keyring.find("a") is None
        assert keyring.find("new") is client
        assert client.take_request(0.0) > 0
        assert client.permits.free == -1
        assert not client.permits.can_take(1)
    assert client.permits.can_take(1)


def test_limits_come_and_go() -> None:
    keyring = Keyring([B], 0.0)
    client = keyring.find("b")
    assert client is not None
    keyring.replace([replace(B, requests_per_minute=1)], 0.0)
    assert [client.take_request(0.0) > 0 for _ in range(2)] == [False, True]
    keyring.replace([B], 0.0)
    assert client.take_request(0.0) == 0.0


def test_a_key_that_is_gone_opens_nothing() -> None:
    keyring = Keyring([A, B], 0.0)
    keyring.replace([A], 0.0)
    assert keyring.find("b") is None
