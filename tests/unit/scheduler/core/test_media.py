"""Pictures and sounds as prompts have them: equal content has the same id, wherever it came from."""

import pytest

from caravan_scheduler.core.media import Picture, Sound


def test_equal_content_has_the_same_id_and_other_content_another() -> None:
    picture = Picture.of(2, 3, bytes(18))
    assert picture.id == Picture.of(2, 3, bytes(18)).id
    others = [
        Picture.of(3, 2, bytes(18)).id,
        Picture.of(2, 3, bytes(17) + b"\1").id,
        Picture.of(6, 1, bytes(18)).id,
        Sound.of(16_000, bytes(16)).id,
        Sound.of(24_000, bytes(16)).id,
        Sound.of(16_000, bytes(20)).id,
    ]
    assert len({picture.id, *others}) == 7
    assert all(len(known) == 32 for known in (picture.id, *others))


def test_content_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"have 18 bytes\. Given: 17"):
        Picture.of(2, 3, bytes(17))
    with pytest.raises(ValueError, match="4 bytes each"):
        Sound.of(16_000, bytes(7))


def test_a_sound_knows_the_number_of_its_samples() -> None:
    assert Sound.of(16_000, bytes(40)).count == 10
