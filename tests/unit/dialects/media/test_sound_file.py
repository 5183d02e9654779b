"""Sounds are decoded to one channel at the rate of the model's encoder, and are bounded."""

import array
import itertools
import math
from collections.abc import Callable

import miniaudio
import pytest

from caravan_dialects.media import limits
from caravan_dialects.media.problems import MediaFileError, Reason
from caravan_dialects.media.sound_file import decode_sound
from caravan_testing.hostile_pictures import RATE, flac, float_wav, silent_mp3, tone, wav


def floats(data: bytes) -> "array.array[float]":
    samples = array.array("f")
    samples.frombytes(data)
    return samples


def test_a_sound_of_the_same_rate_keeps_its_samples() -> None:
    samples = tone(0.5)
    decoded = floats(decode_sound(wav(samples), RATE))
    assert len(decoded) == len(samples)
    assert all(abs(got - given / 32768) < 1e-4 for got, given in zip(decoded, samples, strict=True))


@pytest.mark.parametrize(("rate", "channels"), [(44_100, 1), (48_000, 2), (8000, 1)])
def test_another_rate_and_more_channels_become_those_of_the_model(rate: int, channels: int) -> None:
    decoded = floats(decode_sound(wav(tone(0.5, rate, channels), rate, channels), RATE))
    assert abs(len(decoded) - RATE // 2) <= 2
    assert 0.25 < max(decoded) < 0.29
    crossings = sum(before < 0 <= after for before, after in itertools.pairwise(decoded))
    assert abs(crossings - 220) <= 2


def test_flac_and_mp3_are_decoded_too() -> None:
    samples = tone(0.5)
    assert decode_sound(flac(samples), RATE) == decode_sound(wav(samples), RATE)
    silence = floats(decode_sound(silent_mp3(20), 44_100))
    assert abs(len(silence) - 20 * 1152) <= 2 * 1152
    assert set(silence) == {0.0}


def test_the_samples_are_those_that_llama_cpp_would_decode() -> None:
    """Its helper calls miniaudio with the same settings."""
    data = wav(tone(0.3, 44_100, 2), 44_100, 2)
    whole = miniaudio.decode(data, miniaudio.SampleFormat.FLOAT32, nchannels=1, sample_rate=RATE)
    assert floats(decode_sound(data, RATE)) == whole.samples


REFUSED: list[tuple[str, Callable[[], bytes], Reason, str]] = [
    ("nothing", lambda: b"", Reason.FORMAT, "must be a WAV, MP3 or FLAC file"),
    ("ogg", lambda: b"OggS" + bytes(100), Reason.FORMAT, "must be a WAV"),
    ("webp", lambda: b"RIFF\x24\0\0\0WEBPVP8 ", Reason.FORMAT, "must be a WAV"),
    ("short", lambda: wav(tone(0.05)), Reason.SIZE, "at least 0.1 seconds. Given: 0.050"),
    ("no samples", lambda: wav(array.array("h")), Reason.SIZE, "at least 0.1 seconds"),
    ("not a number", lambda: float_wav([0.0, math.nan] * RATE), Reason.BROKEN, "not between -16 and 16"),
    ("infinite", lambda: float_wav([0.0, math.inf] * RATE), Reason.BROKEN, "not between"),
    ("huge", lambda: float_wav([0.0, -1e30] * RATE), Reason.BROKEN, "not between"),
]


@pytest.mark.parametrize(("name", "make", "reason", "words"), REFUSED, ids=[name for name, *_ in REFUSED])
def test_what_is_no_sound_for_a_model_is_refused(
    name: str, make: Callable[[], bytes], reason: Reason, words: str
) -> None:
    with pytest.raises(MediaFileError) as caught:
        decode_sound(make(), RATE)
    assert caught.value.reason is reason, name
    assert words in str(caught.value)


def test_a_long_sound_is_refused_when_it_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caravan_dialects.media.sound_file.MAX_SOUND_S", 1)
    assert len(decode_sound(wav(tone(1.0)), RATE)) == 4 * RATE
    with pytest.raises(MediaFileError, match="must last at most 1 seconds"):
        decode_sound(wav(tone(1.1)), RATE)


def test_more_bytes_than_allowed_are_refused_unread() -> None:
    with pytest.raises(MediaFileError, match=f"at most {limits.MAX_SOUND_BYTES} bytes"):
        decode_sound(bytes(limits.MAX_SOUND_BYTES + 1), RATE)


@pytest.mark.parametrize("data", [b"fLaC" + bytes(60), b"ID3" + bytes(60), b"RIFF\0\0\0\0WAVE", b"\xff\xfb" * 500])
def test_a_broken_file_raises_an_error_of_its_own(data: bytes) -> None:
    with pytest.raises((miniaudio.MiniaudioError, MediaFileError)):
        decode_sound(data, RATE)
