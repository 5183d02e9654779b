"""Files are decoded in processes that may die or hang: no request is lost but that of the file, and nothing grows."""

import asyncio
import base64
import os
import resource
import signal
from pathlib import Path

import pytest
from PIL import Image

from caravan_dialects.media.decoder import MediaDecoder
from caravan_dialects.media.file import MAX_PICTURE_BYTES, MediaFile, MediaFileError, Reason
from caravan_scheduler.core.errors import HelperError
from caravan_scheduler.core.media import Picture, Sound
from caravan_testing.closing import Closing
from caravan_testing.hostile_pictures import RATE, harmless_files, hostile_files, noise, picture_file, tone, wav
from caravan_testing.waiting import deliver

# For files that end of themselves, also on a busy machine.
LONG_TIME_LIMIT_S = 60.0


@pytest.fixture
def decoder(closing: Closing) -> MediaDecoder:
    return closing(MediaDecoder(LONG_TIME_LIMIT_S, remembered_bytes=0))


def in_base64(data: bytes) -> MediaFile:
    return MediaFile(base64.b64encode(data).decode())


PICTURE = noise()
FILE = picture_file(PICTURE)


async def test_a_file_becomes_a_picture_or_a_sound(decoder: MediaDecoder) -> None:
    expected = Picture.of(24, 24, PICTURE.tobytes())
    assert await decoder.decode(MediaFile(FILE)) == expected
    assert await decoder.decode(in_base64(FILE)) == expected
    lines = base64.encodebytes(FILE).decode()
    assert "\n" in lines.strip()
    assert await decoder.decode(MediaFile(lines)) == expected
    sound = await decoder.decode(MediaFile(wav(tone(0.5)), RATE))
    assert isinstance(sound, Sound)
    assert (sound.sample_rate, sound.count) == (RATE, RATE // 2)


@pytest.mark.parametrize("text", ["AAA", "AA=A", "*AAA", "é", "\ud800", "data:image/png;base64,AAAA"])
async def test_what_is_no_base64_is_refused(decoder: MediaDecoder, text: str) -> None:
    with pytest.raises(MediaFileError, match="must be valid base64") as caught:
        await decoder.decode(MediaFile(text))
    assert caught.value.reason is Reason.ENCODING


async def test_too_many_bytes_are_refused_before_a_process_sees_them(decoder: MediaDecoder) -> None:
    for file in (MediaFile(bytes(MAX_PICTURE_BYTES + 1)), MediaFile("A" * (MAX_PICTURE_BYTES * 4 // 3 + 8))):
        with pytest.raises(MediaFileError, match=f"at most {MAX_PICTURE_BYTES} bytes"):
            await decoder.decode(file)
    assert not decoder.processes.idle_pids


async def test_hostile_files_are_refused_and_leave_the_process_as_it_was(decoder: MediaDecoder) -> None:
    await decoder.decode(MediaFile(FILE))
    (pid,) = decoder.processes.idle_pids
    files = list(hostile_files())
    assert len(files) > 300
    refused = {Reason.FORMAT: 0, Reason.SIZE: 0, Reason.BROKEN: 0}
    before = longest = 0
    for turn in range(2):
        for name, data in files:
            try:
                picture = await decoder.decode(MediaFile(data))
            except MediaFileError as error:
                refused[error.reason] += 1
                longest = max(longest, len(str(error)))
            else:
                # What was flipped is not looked at, or it changes colours.
                assert isinstance(picture, Picture)
                assert min(picture.width, picture.height) >= 2, name
        if turn == 0:
            before = await _memory(pid)
    assert sum(refused.values()) > 2 * 240
    assert longest < 300
    assert decoder.processes.idle_pids == [pid]
    assert await _memory(pid) < before + (16 << 20)


async def test_odd_files_are_pictures(decoder: MediaDecoder) -> None:
    for name, data in harmless_files():
        picture = await decoder.decode(MediaFile(data))
        assert isinstance(picture, Picture)
        assert (picture.width, picture.height) == (24, 24), name


async def _memory(pid: int, column: int = 1) -> int:
    """Return how many bytes of memory a process uses; in column 0, how many it has addresses for."""
    pages = (await asyncio.to_thread(Path(f"/proc/{pid}/statm").read_text)).split()[column]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


async def test_a_process_that_was_killed_loses_no_request(decoder: MediaDecoder) -> None:
    await asyncio.gather(*(decoder.decode(MediaFile(FILE)) for _ in range(2)))
    pids = decoder.processes.idle_pids
    assert len(pids) == 2
    for pid in pids:
        await deliver(pid, signal.SIGKILL)
    pictures = await asyncio.gather(*(decoder.decode(MediaFile(FILE)) for _ in range(4)))
    assert pictures == [Picture.of(24, 24, PICTURE.tobytes())] * 4
    assert not set(decoder.processes.idle_pids) & set(pids)


async def test_a_process_that_hangs_is_replaced_and_the_file_tried_again(closing: Closing) -> None:
    decoder = closing(MediaDecoder(time_limit_s=1.0, grace_s=0.5, remembered_bytes=0))
    await decoder.decode(MediaFile(FILE))
    (pid,) = decoder.processes.idle_pids
    await deliver(pid, signal.SIGSTOP)
    assert await decoder.decode(MediaFile(FILE)) == Picture.of(24, 24, PICTURE.tobytes())
    assert pid not in decoder.processes.idle_pids


async def test_a_file_that_uses_up_its_time_is_refused_and_not_tried_again(closing: Closing) -> None:
    decoder = closing(MediaDecoder(time_limit_s=0.001, grace_s=LONG_TIME_LIMIT_S))
    large = picture_file(noise().resize((3000, 3000)), "JPEG")
    with pytest.raises(MediaFileError, match=r"takes more than 0\.001 s to decode") as caught:
        await decoder.decode(MediaFile(large))
    assert caught.value.reason is Reason.TIME


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Processes load this code in place of Pillow."""
    (tmp_path / "PIL").mkdir()
    (tmp_path / "PIL" / "__init__.py").write_text(request.param)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("library", ["import os; os.abort()"], indirect=True)
async def test_a_file_that_ends_two_processes_is_refused(
    monkeypatch: pytest.MonkeyPatch, decoder: MediaDecoder
) -> None:
    with pytest.raises(MediaFileError, match="two processes that tried it ended") as caught:
        await decoder.decode(MediaFile(FILE))
    assert caught.value.reason is Reason.DECODER
    monkeypatch.delenv("PYTHONPATH")
    assert isinstance(await decoder.decode(MediaFile(FILE)), Picture)


# As where the kernel kills a process for memory.
@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("library", ["import os; os.kill(os.getpid(), 9)"], indirect=True)
async def test_a_file_is_not_blamed_for_two_processes_that_others_end(decoder: MediaDecoder) -> None:
    with pytest.raises(HelperError, match="cannot be decoded at present"):
        await decoder.decode(MediaFile(FILE))


async def test_a_picture_that_needs_too_much_memory_is_refused(decoder: MediaDecoder) -> None:
    await decoder.decode(MediaFile(FILE))
    (pid,) = decoder.processes.idle_pids
    size = await _memory(pid, column=0) + (64 << 20)
    resource.prlimit(pid, resource.RLIMIT_AS, (size, size))
    large = picture_file(noise(1).resize((6000, 6000)))
    with pytest.raises(MediaFileError, match="too much memory") as caught:
        await decoder.decode(MediaFile(large))
    assert caught.value.reason is Reason.MEMORY
    assert decoder.processes.idle_pids == [pid]
    assert isinstance(await decoder.decode(MediaFile(FILE)), Picture)


async def test_the_process_can_open_nothing(decoder: MediaDecoder) -> None:
    await decoder.decode(MediaFile(FILE))
    (pid,) = decoder.processes.idle_pids
    limits = await asyncio.to_thread(Path(f"/proc/{pid}/limits").read_text)
    assert "Max open files            0                    0" in limits
    environment = await asyncio.to_thread(Path(f"/proc/{pid}/environ").read_text)
    assert "PATH=" not in environment.replace("PYTHONPATH=", "")


async def test_a_file_that_comes_again_is_not_decoded_again(closing: Closing) -> None:
    decoder = closing(MediaDecoder(LONG_TIME_LIMIT_S, remembered_bytes=2 * 3 * 24 * 24))
    first = await decoder.decode(MediaFile(FILE), "a")
    assert await decoder.decode(MediaFile(FILE), "a") is first
    # What one client has sent tells another nothing.
    other = await decoder.decode(MediaFile(FILE), "b")
    assert other == first
    assert other is not first
    # There is room for two.
    await decoder.decode(in_base64(FILE), "a")
    again = await decoder.decode(MediaFile(FILE), "a")
    assert again == first
    assert again is not first


@pytest.mark.slow
async def test_the_largest_transparent_picture_fits_the_memory_of_a_process(closing: Closing) -> None:
    """No other format and mode needs as much."""
    decoder = closing(MediaDecoder(LONG_TIME_LIMIT_S))
    data = await asyncio.to_thread(lambda: picture_file(Image.new("RGBA", (7000, 7000), (9, 9, 9, 9)), "WEBP"))
    picture = await decoder.decode(MediaFile(data))
    assert isinstance(picture, Picture)
    assert (picture.width, picture.height) == (2048, 2048)
