"""The environment in which a shard's memory has huge pages."""

import pytest

from caravan_shard.huge_pages import with_huge_pages

ON_REQUEST, ALWAYS, NEVER = "always [madvise] never\n", "[always] madvise never\n", "always madvise [never]\n"


@pytest.mark.parametrize(
    ("tunables", "expected"),
    [
        (None, "glibc.malloc.hugetlb=1"),
        ("", "glibc.malloc.hugetlb=1"),
        ("glibc.malloc.arena_max=2", "glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1"),
    ],
)
def test_huge_pages_are_asked_for_beside_other_tunables(tunables: str | None, expected: str) -> None:
    given = {"PATH": "/bin"} if tunables is None else {"PATH": "/bin", "GLIBC_TUNABLES": tunables}
    assert with_huge_pages(given, ON_REQUEST, "glibc 2.36") == {"PATH": "/bin", "GLIBC_TUNABLES": expected}


@pytest.mark.parametrize(
    "tunables", ["glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=1", "a.b=1:glibc.malloc.hugetlb=2"]
)
def test_what_the_user_has_set_stays(tunables: str) -> None:
    assert with_huge_pages({"GLIBC_TUNABLES": tunables}, ON_REQUEST, "glibc 2.36") is None


@pytest.mark.parametrize(
    ("mode", "libc"),
    [
        (ALWAYS, "glibc 2.36"),
        (NEVER, "glibc 2.36"),
        ("", "glibc 2.36"),
        (ON_REQUEST, "glibc 2.34"),
        (ON_REQUEST, "glibc unknown"),
        (ON_REQUEST, ""),
    ],
)
def test_nothing_is_asked_of_a_system_that_needs_or_knows_nothing(mode: str, libc: str) -> None:
    assert with_huge_pages({}, mode, libc) is None


def test_a_newer_glibc_is_asked() -> None:
    assert with_huge_pages({}, ON_REQUEST, "glibc 3.0") is not None
