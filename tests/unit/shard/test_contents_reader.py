"""Reading the files of a model beside its work."""

from typing import Any
from unittest.mock import Mock

from caravan_shard.config import ShardConfig
from caravan_shard.service.contents import ContentsReader


async def test_what_is_read_after_the_end_begins_no_task() -> None:
    """The loop may be about to close, and a task that it never starts is a coroutine that is never awaited."""
    unused: Any = Mock()
    reader = ContentsReader(ShardConfig(backend="fake"), unused, unused)
    reader.end()
    reader._begin_telling(unused, None)
    assert reader._telling is None
