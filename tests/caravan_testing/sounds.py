"""Makes files of sounds without an encoder: its MP3 files are silent, and its FLAC files are not compressed."""

import array
import io
import math
import struct
import wave

RATE = 16_000
_FLAC_BLOCK = 4096


def tone(seconds: float, rate: int = RATE, channels: int = 1) -> "array.array[int]":
    """Return 16-bit samples of 440 Hz, the same in all channels."""
    values = (int(9000 * math.sin(at * 2 * math.pi * 440 / rate)) for at in range(int(seconds * rate)))
    return array.array("h", (value for value in values for _ in range(channels)))


def wav(samples: "array.array[int]", rate: int = RATE, channels: int = 1) -> bytes:
    """Return a WAV file of 16-bit samples."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.tobytes())
    return out.getvalue()


def float_wav(values: list[float], rate: int = RATE) -> bytes:
    """Return a WAV file of 32-bit floats."""
    data = struct.pack(f"<{len(values)}f", *values)
    form = b"fmt " + struct.pack("<IHHIIHH", 16, 3, 1, rate, rate * 4, 4, 32)
    body = b"WAVE" + form + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def silent_mp3(frames: int) -> bytes:
    """Return an MP3 file of ``frames`` frames of 1152 samples at 44.1 kHz: 128 kbit/s, one channel, no signal."""
    return (b"\xff\xfb\x90\xc4" + bytes(413)) * frames


def flac(samples: "array.array[int]", rate: int = RATE) -> bytes:
    """Return a FLAC file of one channel whose frames have the samples as they are."""
    sizes = struct.pack(">HH", _FLAC_BLOCK, _FLAC_BLOCK) + bytes(6)
    described = (rate << 44 | 0 << 41 | 15 << 36 | len(samples)).to_bytes(8, "big")
    info = sizes + described + bytes(16)
    blocks = [samples[start : start + _FLAC_BLOCK] for start in range(0, len(samples), _FLAC_BLOCK)]
    frames = b"".join(_flac_frame(number, block) for number, block in enumerate(blocks))
    return b"fLaC\x80" + len(info).to_bytes(3, "big") + info + frames


def _flac_frame(number: int, block: "array.array[int]") -> bytes:
    assert number < 128, "the number of a frame is coded as a character of UTF-8"
    head = b"\xff\xf8\x70\x08" + bytes((number,)) + struct.pack(">H", len(block) - 1)
    head += bytes((_crc(head, 0x07, 8),))
    frame = head + b"\x02" + struct.pack(f">{len(block)}h", *block)
    return frame + _crc(frame, 0x8005, 16).to_bytes(2, "big")


def _crc(data: bytes, polynomial: int, bits: int) -> int:
    top, mask, value = 1 << (bits - 1), (1 << bits) - 1, 0
    for byte in data:
        value ^= byte << (bits - 8)
        for _ in range(8):
            value = ((value << 1) ^ (polynomial if value & top else 0)) & mask
    return value
