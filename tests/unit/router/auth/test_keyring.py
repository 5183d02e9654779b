from dataclasses import replace

from caravan_dialects.auth.key import ApiKey, digest_of
from caravan_router.auth.keyring import Keyring
from caravan_scheduler.core.generation import Tenant

A = ApiKey(digest=digest_of("a"), tenant=Tenant(name="a"), requests_per_minute=1, concurrent_requests=2)
B = ApiKey(digest=digest_of("b"), tenant=Tenant(name="b"))


def test_a_client_is_found_by_its_key_and_by_nothing_else() -> None:
    keyring = Keyring([A, B], 0.0)
    for secret, key in (("a", A), ("b", B)):
        client = keyring.find(secret)
        assert client is not None
        assert client.key is key
    assert keyring.find("") is None
    assert keyring.find(A.digest.hex()) is None
    assert keyring.find("\udcff") is None


def test_a_key_without_limits_is_not_limited() -> None:
    client = Keyring([B], 0.0).find("b")
    assert client is not None
    assert not any(client.take_request(0.0) for _ in range(1000))
    assert client.permits.can_take(10**9)


def test_used_up_allowance_survives_a_reload() -> None:
    keyring = Keyring([A], 0.0)
    client = keyring.find("a")
    assert client is not None
    assert client.take_request(0.0) == 0.0
    with client.permits.take(2):
        # The same name gets a new key and a lower limit.
        keyring.replace([replace(A, digest=digest_of("new"), concurrent_requests=1), B], 0.0)
        assert keyring.find("a") is None
        assert keyring.find("new") is client
        assert client.take_request(0.0) > 0
        assert client.permits.free == -1
        assert not client.permits.can_take(1)
    assert client.permits.can_take(1)


def test_a_reload_adds_and_removes_limits() -> None:
    keyring = Keyring([B], 0.0)
    client = keyring.find("b")
    assert client is not None
    keyring.replace([replace(B, requests_per_minute=1)], 0.0)
    assert [client.take_request(0.0) > 0 for _ in range(2)] == [False, True]
    keyring.replace([B], 0.0)
    assert client.take_request(0.0) == 0.0


def test_a_removed_key_is_not_found() -> None:
    keyring = Keyring([A, B], 0.0)
    keyring.replace([A], 0.0)
    assert keyring.find("b") is None
