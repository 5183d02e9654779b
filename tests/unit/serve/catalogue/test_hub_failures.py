"""A full disk and a silent hub are no faults of the operator who asks for a model."""

import pytest

from caravan_dialects.api.errors import RequestError, kind_of
from caravan_dialects.api.generation.catalogue_errors import catalogue_errors
from caravan_models.errors import FetchError, FetchProblem
from caravan_models.reference import parse_hub
from caravan_serve.catalogue import stock


@pytest.mark.parametrize(
    ("problem", "status"),
    [
        (FetchProblem.DISK_FULL, 503),
        (FetchProblem.NO_NETWORK, 503),
        (FetchProblem.CACHE_UNUSABLE, 503),
        (FetchProblem.NO_REPOSITORY, 400),
        (FetchProblem.GATED, 400),
    ],
)
async def test_who_is_blamed_when_a_pull_fails(
    monkeypatch: pytest.MonkeyPatch, problem: FetchProblem, status: int
) -> None:
    async def fail(*_: object) -> None:
        raise FetchError(problem, "it fails")

    monkeypatch.setattr(stock, "fetch", fail)
    with pytest.raises(RequestError, match="it fails") as caught, catalogue_errors():
        async for _ in stock.pulled(parse_hub("owner/model:Q8_0")):
            pass
    assert kind_of(caught.value).status == status
