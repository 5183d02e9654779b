"""Downloads that are under way."""

from caravan_scheduler.core.catalogue import Download
from caravan_serve.catalogue.shelf import Downloads


def test_a_download_is_under_way_from_its_first_note_to_its_end() -> None:
    told: list[str] = []
    downloads = Downloads(told.append)
    with downloads.of("a") as note:
        assert downloads.find("a") is None
        assert told == []
        note(Download(0, 10))
        note(Download(4, 10))
        assert downloads.find("a") == Download(4, 10)
        assert downloads.names == ["a"]
    assert downloads.find("a") is None
    assert told == ["a", "a", "a"]


def test_downloads_of_one_model_are_told_of_as_one_that_never_goes_back() -> None:
    downloads = Downloads(lambda _: None)
    with downloads.of("a") as first, downloads.of("b") as other:
        first(Download(4, 10))
        other(Download(9, 9))
        with downloads.of("a") as second:
            second(Download(2, 10))
            assert downloads.find("a") == Download(4, 10)
            second(Download(6, 10))
            assert downloads.find("a") == Download(6, 10)
        assert downloads.names == ["a", "b"]


def test_what_needs_no_download_is_not_told() -> None:
    told: list[str] = []
    with Downloads(told.append).of("a"):
        pass
    assert told == []
