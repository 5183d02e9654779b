"""The bytes of a run on its way to another shard."""

import numpy as np
import pytest

from caravan_shard.protocol.commands import StoredRun
from caravan_shard.sequences.run_format import FIXED_BYTES, BadRunError, RunFormat, RunReceiver

FORMAT = RunFormat("ab" * 32)
KEYS = (b"first key of run", b"last key of run.")
RUN = StoredRun(start=3, cuts=(8, 20), keys=KEYS, size=60, note=b"a prompt")
STATE = np.arange(60, dtype=np.uint8)
DATA = FORMAT.header(RUN, STATE) + STATE.tobytes()


def receive(
    data: bytes, part: int = 1 << 20, *, key: bytes = KEYS[-1], most_bytes: int = 60
) -> tuple[StoredRun, bytes]:
    receiver = RunReceiver(FORMAT, key, most_bytes)
    for at in range(0, len(data), part):
        receiver.add(data[at : at + part])
    run, state = receiver.finish()
    return run, state.tobytes()


@pytest.mark.parametrize("part", [1, 7, FIXED_BYTES, FIXED_BYTES + 1, 1_000])
def test_a_run_comes_in_parts_of_any_size(part: int) -> None:
    assert receive(DATA, part) == (RUN, STATE.tobytes())


def test_every_changed_byte_is_noticed() -> None:
    for at in range(len(DATA)):
        with pytest.raises(BadRunError):
            receive(DATA[:at] + bytes([DATA[at] ^ 1]) + DATA[at + 1 :])


@pytest.mark.parametrize("length", [0, 1, FIXED_BYTES - 1, FIXED_BYTES, len(DATA) - 61, len(DATA) - 1])
def test_a_truncated_run_is_noticed(length: int) -> None:
    with pytest.raises(BadRunError):
        receive(DATA[:length])


def test_what_is_not_expected_is_refused_before_it_takes_memory() -> None:
    with pytest.raises(BadRunError, match="60 bytes, where there is room for 59"):
        receive(DATA[:FIXED_BYTES], most_bytes=59)
    with pytest.raises(BadRunError, match="fingerprint"):
        RunReceiver(RunFormat("cd" * 32), KEYS[-1], 60).add(DATA)
    with pytest.raises(BadRunError, match="more bytes"):
        receive(DATA + b"x", part=11)
    with pytest.raises(BadRunError, match="another run"):
        receive(DATA, key=KEYS[0])
