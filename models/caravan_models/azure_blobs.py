"""Files of Azure's blob storage: their URLs, signed with what the environment has.

Variables are those of Azure's own command line: AZURE_STORAGE_ACCOUNT, AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN,
and AZURE_STORAGE_SERVICE_ENDPOINT for other clouds and emulators. Without a key and a token, the URL is not signed,
which is right for public blobs. Signatures are those of a service SAS, version 2020-12-06.
"""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from urllib.parse import quote, urlencode, urlsplit

from caravan_models.errors import FetchError, FetchProblem

SCHEME = "az"
_VERSION = "2020-12-06"
_READ, _BLOB = "r", "b"
# For a download that is cut off and continues.
_EXPIRES = timedelta(days=1)


def blob_url(url: str, environ: Mapping[str, str], now: datetime | None = None) -> str:
    """Return the HTTP URL of ``az://CONTAINER/BLOB``, signed if the environment has a key. Raises FetchError."""
    parts = urlsplit(url)
    container, blob = parts.netloc, parts.path.removeprefix("/")
    if not (container and blob) or parts.query:
        raise FetchError(FetchProblem.BAD_REFERENCE, f"a blob's URL is az://CONTAINER/BLOB. Given: {url!r}")
    account = environ.get("AZURE_STORAGE_ACCOUNT", "")
    if not account:
        raise FetchError(FetchProblem.BAD_REFERENCE, f"AZURE_STORAGE_ACCOUNT must name the storage account of {url}")
    endpoint = environ.get("AZURE_STORAGE_SERVICE_ENDPOINT") or f"https://{account}.blob.core.windows.net"
    place = f"{endpoint.rstrip('/')}/{container}/{quote(blob, safe='/-_.~')}"
    if token := environ.get("AZURE_STORAGE_SAS_TOKEN", "").removeprefix("?"):
        return f"{place}?{token}"
    if key := environ.get("AZURE_STORAGE_KEY", ""):
        return f"{place}?{_token(key, f'/blob/{account}/{container}/{blob}', now or datetime.now(UTC))}"
    return place


def _token(key: str, resource: str, now: datetime) -> str:
    """Return a query that lets its owner read ``resource``. Raises FetchError."""
    try:
        secret = base64.b64decode(key, validate=True)
    except binascii.Error:
        raise FetchError(FetchProblem.BAD_REFERENCE, "AZURE_STORAGE_KEY must be base64, as Azure shows it") from None
    expiry = (now + _EXPIRES).strftime("%Y-%m-%dT%H:%M:%SZ")
    # Empty: start; identifier, IP, protocol; snapshot time, encryption scope, and five headers of the reply.
    text = "\n".join([_READ, "", expiry, resource, "", "", "", _VERSION, _BLOB, *("",) * 7])
    signature = base64.b64encode(hmac.digest(secret, text.encode(), hashlib.sha256)).decode()
    return urlencode({"sv": _VERSION, "sr": _BLOB, "sp": _READ, "se": expiry, "sig": signature})
