"""What llama.cpp's encoder starts beside the thread that encodes ends with it, since OpenMP counts its threads."""

import os
from pathlib import Path

from caravan_proto.messages.limits import KvLayout
from caravan_shard.service.media import EncoderThread
from caravan_shard.service.model_calls import ModelCalls
from caravan_testing.media_kinds import KINDS, MadeKind
from caravan_testing.waiting import eventually


def _threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


async def test_a_team_of_threads_ends_with_the_encoding(tmp_path: Path) -> None:
    made = MadeKind(KINDS[0], KvLayout.SPLIT, tmp_path, media_threads=2)
    medium = made.medium(0)

    def encode() -> set[str]:
        made.driver.backend.media.encode(medium.shape, medium.data)
        return _threads()

    before = _threads()
    during = await EncoderThread(ModelCalls(made.driver.backend.vocabulary.users)).run(encode)
    assert isinstance(during, set)
    assert len(during - before) == 2
    await eventually(lambda: _threads() <= before)
    made.close()
