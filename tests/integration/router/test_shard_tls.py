"""Mutual TLS between router and shards, as processes: which certificates are accepted, what is said of others."""

import asyncio
import contextlib
import signal
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import trustme
from aiohttp import ClientSession

from caravan_proto.channel import client_options
from caravan_proto.shard.v1 import shard_pb2, shard_pb2_grpc
from caravan_testing.certificates import Certificate, write_certificate
from caravan_testing.cluster import body, expected_text, generate
from caravan_testing.programs import Program, address_of, program, url_of
from caravan_testing.waiting import eventually, in_time

NAME = "shard.test"


class Authorities:
    """Our authority and another one, and the certificates that they have issued."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ours, self._another = trustme.CA(), trustme.CA()

    def issue(
        self, holder: str, *names: str, expired: bool = False, by_another: bool = False, trusts_another: bool = False
    ) -> Certificate:
        issuer = self._another if by_another else self._ours
        trusted = self._another if trusts_another else self._ours
        return write_certificate(self._folder, holder, names, issuer, trusted, expired=expired)


@pytest.fixture
def authorities(tmp_path: Path) -> Authorities:
    return Authorities(tmp_path)


@contextlib.asynccontextmanager
async def shard(*flags: str, address: str = "127.0.0.1:0") -> AsyncIterator[Program]:
    async with program("caravan_shard", "--backend", "fake", "--address", address, *flags) as running:
        yield running


@contextlib.asynccontextmanager
async def router(*shards: str, flags: list[str] | None = None) -> AsyncIterator[Program]:
    listed = [word for address in shards for word in ("--shard", address)]
    async with program("caravan_serve", "router", "--port", "0", *listed, *(flags or [])) as running:
        yield running


async def standings(running: Program) -> dict[str, dict[str, Any]]:
    """Return what GET /admin/shards says of each address."""
    async with ClientSession() as client, client.get(f"{await url_of(running)}/admin/shards") as response:
        return {one["address"]: one for one in (await response.json())["shards"]}


async def standing(running: Program, address: str, state: str, reason: str) -> dict[str, Any]:
    """Wait until the shard at ``address`` is in ``state`` with ``reason`` in its reason, and return its entry."""

    async def look() -> dict[str, Any]:
        return (await standings(running)).get(address, {})

    return await eventually(
        look,
        f"{address} is {state}: {reason}",
        lambda found: found.get("state") == state and reason in (found["reason"] or ""),
    )


async def serial_of(address: str) -> bytes:
    """Return the certificate that the shard at ``address`` shows, as DER."""
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    shown: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.transport.abort()
    return shown


async def test_a_router_joins_only_shards_with_a_good_certificate(authorities: Authorities) -> None:
    certificates = {
        "good": authorities.issue("good", NAME),
        "expired": authorities.issue("expired", NAME, expired=True),
        "of another authority": authorities.issue("other", NAME, by_another=True),
        "of another name": authorities.issue("misnamed", "elsewhere.test"),
    }
    reasons = {
        "expired": "the shard's certificate is refused: certificate has expired",
        "of another authority": "the shard's certificate is refused: unable to get local issuer certificate",
        "of another name": "the shard's certificate is refused: Hostname mismatch, certificate is not valid for "
        f"'{NAME}'.",
        "none": "the shard does not speak TLS as expected: WRONG_VERSION_NUMBER",
    }
    async with contextlib.AsyncExitStack() as stack:
        shards = {
            case: await stack.enter_async_context(shard(*certificate.flags("--")))
            for case, certificate in certificates.items()
        }
        shards["none"] = await stack.enter_async_context(shard())
        addresses = {case: await address_of(running) for case, running in shards.items()}
        flags = [*authorities.issue("router", "router.test").flags("--shard-"), "--shard-hostname", NAME]
        running = await stack.enter_async_context(router(*addresses.values(), flags=flags))
        for case, reason in reasons.items():
            found = await standing(running, addresses[case], "joining", reason)
            assert (found["reason"], found["epoch"]) == (reason, 0)
        await standing(running, addresses["good"], "serving", "")
        async with ClientSession() as client:
            answer = await generate(client, await url_of(running), body("hello", 20))
        assert answer["generated_text"] == expected_text("hello", 20)
        # Each shard has been asked several times, and its reason is logged once; a second time if it was not found out
        # in between, which a busy host has no time for.
        for case, reason in reasons.items():
            logged = [line for line in running.log if addresses[case] in line and reason in line]
            assert 1 <= len(logged) <= 2, running.text
            assert all(" ERROR " in line for line in logged)


async def test_a_shard_obeys_only_routers_with_a_good_certificate(authorities: Authorities) -> None:
    refused = "the shard refuses the router's certificate; its log says why"
    # The address of a shard is the name of its certificate where no other name is given.
    async with shard(*authorities.issue("shard", "127.0.0.1").flags("--")) as running:
        address = await address_of(running)
        cases = [
            (authorities.issue("expired", "r", expired=True).flags("--shard-"), refused, "certificate has expired"),
            (
                authorities.issue("other", "r", by_another=True).flags("--shard-"),
                refused,
                "unable to get local issuer certificate",
            ),
            (
                [],
                "the shard requires TLS: pass --shard-certfile, --shard-keyfile and --shard-ca-certs",
                "WRONG_VERSION_NUMBER",
            ),
        ]
        for flags, reason, logged_by_shard in cases:
            async with router(address, flags=flags) as refused_router:
                assert (await standing(refused_router, address, "joining", reason))["epoch"] == 0
                assert refused_router.find(f"ERROR.*{reason}")
                await running.logged(logged_by_shard)
        trusting = await asyncio.to_thread(Path(authorities.issue("nobody", "r").authorities).read_bytes)
        credentials = grpc.ssl_channel_credentials(trusting)
        async with grpc.aio.secure_channel(address, credentials, options=client_options()) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await shard_pb2_grpc.ShardServiceStub(channel).Info(shard_pb2.InfoRequest())
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE
            await running.logged("PEER_DID_NOT_RETURN_A_CERTIFICATE")
        async with router(address, flags=authorities.issue("router", "r").flags("--shard-")) as accepted:
            await standing(accepted, address, "serving", "")


async def test_certificates_are_read_again_without_a_restart(authorities: Authorities) -> None:
    def reissue(**how: bool) -> tuple[Certificate, Certificate]:
        return authorities.issue("shard", "127.0.0.1", **how), authorities.issue("router", "r", **how)

    of_shard, of_router = reissue()
    async with shard(*of_shard.flags("--")) as running:
        address = await address_of(running)
        async with router(address, flags=of_router.flags("--shard-")) as asking:
            await standing(asking, address, "serving", "")
            first = await serial_of(address)
            await asyncio.to_thread(Path(of_shard.key).write_bytes, b"no key")
            assert await serial_of(address) == first
            await running.logged("ERROR.*certificates not reloaded, keeping the old ones: --certfile: ")
            before = (await standings(asking))[address]["epoch"]
            reissue(by_another=True, trusts_another=True)
            assert await serial_of(address) != first
            # The open connection lasts. A new one uses the new files on both sides.
            assert (await standings(asking))[address]["epoch"] == before
            running.process.send_signal(signal.SIGSTOP)
            await standing(asking, address, "lost", "")
            running.process.send_signal(signal.SIGCONT)
            assert (await standing(asking, address, "serving", ""))["epoch"] > before
            await asking.logged("certificates reloaded")


async def test_shards_exchange_runs_over_tls(authorities: Authorities) -> None:
    """The shard that fetches shows its own certificate, and requires the name that the router gives."""
    certificate = authorities.issue("both", NAME)
    async with shard(*certificate.flags("--")) as source, shard(*certificate.flags("--")) as target:
        source_address, target_address = await address_of(source), await address_of(target)
        credentials = await asyncio.to_thread(
            lambda: grpc.ssl_channel_credentials(
                *(Path(path).read_bytes() for path in (certificate.authorities, certificate.key, certificate.chain))
            )
        )
        options = [*client_options(), ("grpc.ssl_target_name_override", NAME)]
        async with grpc.aio.secure_channel(target_address, credentials, options=options) as channel:
            stub: Any = shard_pb2_grpc.ShardServiceStub(channel)
            await stub.Lease(shard_pb2.LeaseRequest(router_id="test", epoch=1, ttl_ms=60_000))
            request = shard_pb2.FetchRunsRequest(
                epoch=1, source_address=source_address, source_epoch=1, keys=[bytes(16)]
            )
            for hostname, reason in (("", "Hostname Verification Check failed"), (NAME, "no router holds this shard")):
                request.source_hostname = hostname
                assert list((await stub.FetchRuns(request)).fetched) == [False]
                await target.logged(f"a run cannot be fetched.*{reason}")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            ("caravan_shard", "--backend", "fake", "--address", "0.0.0.0:0"),
            "address 0.0.0.0:0 is not loopback, and anyone who reaches it could command the shard: pass --certfile",
        ),
        (
            ("caravan_shard", "--backend", "fake", "--certfile", "/none.pem", "--ca-certs", "/none.pem"),
            "--certfile: /none.pem: [Errno 2] No such file or directory",
        ),
        (
            ("caravan_serve", "router", "--shard", "h:1", "--shard-certfile", "/none.pem", "--shard-ca-certs", "/c"),
            "--shard-certfile: /none.pem: [Errno 2] No such file or directory",
        ),
    ],
    ids=["plaintext beyond loopback", "a shard without its file", "a router without its file"],
)
async def test_a_program_that_would_not_be_secure_does_not_start(arguments: tuple[str, ...], problem: str) -> None:
    async with program(*arguments) as running, in_time("the program ends"):
        assert await running.process.wait() == 2
    assert f"error: {problem}" in running.text


async def test_plaintext_beyond_loopback_is_allowed_by_a_flag() -> None:
    async with shard("--allow-plaintext", address="0.0.0.0:0") as running:
        port = (await address_of(running)).rpartition(":")[2]
        async with router(f"127.0.0.1:{port}") as asking:
            await standing(asking, f"127.0.0.1:{port}", "serving", "")
