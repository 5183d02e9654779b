"""Files of object stores that speak S3: their URLs, signed with what the environment has.

Variables are those of AWS' own programs: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION, and
AWS_ENDPOINT_URL for other stores, such as MinIO, Ceph, R2, or Google's with HMAC keys. Without a key, the URL is not
signed, which is right for public objects.
"""

import hashlib
import hmac
from collections.abc import Mapping
from datetime import UTC, datetime
from urllib.parse import quote, urlsplit

from caravan_models.errors import FetchError, FetchProblem

SCHEME = "s3"
_ALGORITHM = "AWS4-HMAC-SHA256"
_DEFAULT_REGION = "us-east-1"
# A day, for a download that is cut off and continues.
_EXPIRES_S = 86_400


def object_url(url: str, environ: Mapping[str, str], now: datetime | None = None) -> str:
    """Return the HTTP URL of ``s3://BUCKET/KEY``, signed if the environment has a key. Raises FetchError."""
    parts = urlsplit(url)
    bucket, key = parts.netloc, parts.path.removeprefix("/")
    if not (bucket and key) or parts.query:
        raise FetchError(FetchProblem.BAD_REFERENCE, f"an object's URL is s3://BUCKET/KEY. Given: {url!r}")
    region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or _DEFAULT_REGION
    endpoint = (environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL") or "").rstrip("/")
    path = quote(key, safe="/-_.~")
    place = f"{endpoint}/{bucket}/{path}" if endpoint else f"https://{bucket}.s3.{region}.amazonaws.com/{path}"
    return signed(place, region, environ, now or datetime.now(UTC))


def signed(url: str, region: str, environ: Mapping[str, str], now: datetime) -> str:
    """Return the URL of an object with a signature of version 4 in its query, or as it is without a key."""
    key, secret = environ.get("AWS_ACCESS_KEY_ID", ""), environ.get("AWS_SECRET_ACCESS_KEY", "")
    if not key:
        return url
    parts = urlsplit(url)
    day, second = now.strftime("%Y%m%d"), now.strftime("%Y%m%dT%H%M%SZ")
    scope = f"{day}/{region}/s3/aws4_request"
    fields = {
        "X-Amz-Algorithm": _ALGORITHM,
        "X-Amz-Credential": f"{key}/{scope}",
        "X-Amz-Date": second,
        "X-Amz-Expires": str(_EXPIRES_S),
        "X-Amz-SignedHeaders": "host",
    }
    if token := environ.get("AWS_SESSION_TOKEN"):
        fields["X-Amz-Security-Token"] = token
    query = "&".join(f"{name}={quote(value, safe='-_.~')}" for name, value in sorted(fields.items()))
    request = "\n".join(["GET", parts.path, query, f"host:{parts.netloc}", "", "host", "UNSIGNED-PAYLOAD"])
    text = "\n".join([_ALGORITHM, second, scope, hashlib.sha256(request.encode()).hexdigest()])
    derived = f"AWS4{secret}".encode()
    for part in (day, region, "s3", "aws4_request"):
        derived = hmac.digest(derived, part.encode(), "sha256")
    signature = hmac.digest(derived, text.encode(), "sha256").hex()
    return f"{url}?{query}&X-Amz-Signature={signature}"
