"""URLs of Azure's blob storage, signed as Azure's own library signs them."""

from datetime import UTC, datetime
from urllib.parse import parse_qs, urlsplit

import pytest

from caravan_models.azure_blobs import blob_url
from caravan_models.errors import FetchError

# That of Azurite, which every copy of it has.
ACCOUNT = {"AZURE_STORAGE_ACCOUNT": "devstoreaccount1"}
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
NOW = datetime(2026, 11, 28, 12, tzinfo=UTC)
PLACE = "https://devstoreaccount1.blob.core.windows.net/models/a%20folder/m.gguf"


def test_the_signature_is_that_of_azures_library() -> None:
    """As azure-storage-blob 12.31.1 signs the same for its owner, as version 2020-12-06."""
    url = blob_url("az://models/a folder/m.gguf", ACCOUNT | {"AZURE_STORAGE_KEY": KEY}, NOW)
    assert url.partition("?")[0] == PLACE
    assert parse_qs(urlsplit(url).query) == {
        "sv": ["2020-12-06"],
        "sr": ["b"],
        "sp": ["r"],
        "se": ["2026-11-29T12:00:00Z"],
        "sig": ["OUzByVWF+rVgZhaWls1vfeDFBfKheXRRsqKGYHYx4O8="],
    }


@pytest.mark.parametrize(
    ("environ", "url"),
    [
        ({}, PLACE),
        ({"AZURE_STORAGE_SAS_TOKEN": "?sv=1&sig=a%2Fb"}, f"{PLACE}?sv=1&sig=a%2Fb"),
        ({"AZURE_STORAGE_SAS_TOKEN": "sv=1", "AZURE_STORAGE_KEY": KEY}, f"{PLACE}?sv=1"),
        (
            {"AZURE_STORAGE_SERVICE_ENDPOINT": "http://azurite:10000/devstoreaccount1/"},
            "http://azurite:10000/devstoreaccount1/models/a%20folder/m.gguf",
        ),
    ],
)
def test_a_blob_is_public_or_has_a_token_and_may_be_elsewhere(environ: dict[str, str], url: str) -> None:
    assert blob_url("az://models/a folder/m.gguf", ACCOUNT | environ) == url


@pytest.mark.parametrize(
    ("url", "environ", "told"),
    [
        ("az://models", ACCOUNT, "a blob's URL is az://CONTAINER/BLOB"),
        ("az://models/", ACCOUNT, "a blob's URL is az://CONTAINER/BLOB"),
        ("az://models/m.gguf?sv=1", ACCOUNT, "a blob's URL is az://CONTAINER/BLOB"),
        ("az://models/m.gguf", {}, "AZURE_STORAGE_ACCOUNT must name the storage account"),
        ("az://models/m.gguf", ACCOUNT | {"AZURE_STORAGE_KEY": "no key"}, "AZURE_STORAGE_KEY must be base64"),
    ],
)
def test_what_is_no_blob_is_refused(url: str, environ: dict[str, str], told: str) -> None:
    with pytest.raises(FetchError, match=told) as raised:
        blob_url(url, environ)
    assert "no key" not in str(raised.value)
