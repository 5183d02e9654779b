"""Certificates for tests, as files. trustme makes them in a few lines, on top of the library `cryptography`."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme


@dataclass(frozen=True, slots=True)
class Certificate:
    """Paths of a certificate chain, its key, and the authority that its holder trusts."""

    chain: str
    key: str
    authorities: str

    def flags(self, prefix: str) -> list[str]:
        """Return the flags of a program that has this certificate; ``prefix``: "--" or "--shard-"."""
        return [f"{prefix}certfile", self.chain, f"{prefix}keyfile", self.key, f"{prefix}ca-certs", self.authorities]


def write_certificate(
    folder: Path, holder: str, names: tuple[str, ...], issuer: trustme.CA, trusted: trustme.CA, *, expired: bool = False
) -> Certificate:
    """Write the files of ``holder``, whose certificate has ``names``, and whose authority is ``trusted``."""
    yesterday = datetime.now(UTC) - timedelta(days=1)
    before, after = (yesterday - timedelta(days=1), yesterday) if expired else (None, None)
    certificate = issuer.issue_cert(*names, not_before=before, not_after=after)
    chain, key, authorities = (folder / f"{holder}-{part}.pem" for part in ("chain", "key", "authorities"))
    chain.write_bytes(b"".join(pem.bytes() for pem in certificate.cert_chain_pems))
    key.write_bytes(certificate.private_key_pem.bytes())
    authorities.write_bytes(trusted.cert_pem.bytes())
    return Certificate(str(chain), str(key), str(authorities))
