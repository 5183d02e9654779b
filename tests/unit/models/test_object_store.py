"""URLs of object stores, signed as AWS' own documentation signs its example."""

from datetime import UTC, datetime
from urllib.parse import parse_qs, urlsplit

import pytest

from caravan_models.errors import FetchError
from caravan_models.object_store import object_url, signed

# "Authenticating Requests: Using Query Parameters" in the documentation of Amazon S3.
KEYS = {
    "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
}
NOW = datetime(2013, 5, 24, tzinfo=UTC)
SIGNATURE = "aeeed9bbccd4d02ee5c0109b86d86835f995330da4c265957d157751f604d404"


def test_the_signature_is_that_of_the_documentation() -> None:
    url = signed("https://examplebucket.s3.amazonaws.com/test.txt", "us-east-1", KEYS, NOW)
    assert parse_qs(urlsplit(url).query)["X-Amz-Signature"] == [SIGNATURE]


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, "https://bucket.s3.us-east-1.amazonaws.com/a%20folder/m.gguf"),
        ({"AWS_REGION": "eu-central-1"}, "https://bucket.s3.eu-central-1.amazonaws.com/a%20folder/m.gguf"),
        ({"AWS_ENDPOINT_URL": "http://minio:9000/"}, "http://minio:9000/bucket/a%20folder/m.gguf"),
    ],
)
def test_an_object_is_at_amazon_or_at_another_endpoint(environ: dict[str, str], place: str) -> None:
    assert object_url("s3://bucket/a folder/m.gguf", environ) == place
    with_key = object_url("s3://bucket/a folder/m.gguf", environ | KEYS, NOW)
    assert with_key.startswith(
        f"{place}?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AKIAIOSFODNN7EXAMPLE%2F20130524%2F"
    )


def test_a_token_of_temporary_keys_is_signed_too() -> None:
    url = object_url("s3://bucket/key", KEYS | {"AWS_SESSION_TOKEN": "a/b=="}, NOW)
    fields = parse_qs(urlsplit(url).query)
    assert fields["X-Amz-Security-Token"] == ["a/b=="]
    assert (
        fields["X-Amz-Signature"]
        != parse_qs(urlsplit(object_url("s3://bucket/key", KEYS, NOW)).query)["X-Amz-Signature"]
    )


@pytest.mark.parametrize("url", ["s3://bucket", "s3://bucket/", "s3:///key", "s3://bucket/key?versionId=1"])
def test_what_is_no_object_is_refused(url: str) -> None:
    with pytest.raises(FetchError, match="an object's URL is s3://BUCKET/KEY"):
        object_url(url, KEYS)
