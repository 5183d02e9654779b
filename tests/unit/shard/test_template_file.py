"""A chat template in a file of its own."""

from pathlib import Path

import pytest

from caravan_shard.backends.base import StartupError
from caravan_shard.backends.llama.model.loading import template_in


def test_a_template_is_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("{{ messages[0].content }} é")
    assert template_in(path) == "{{ messages[0].content }} é"
    for content in (b" \n", b"\xff", b"x" * ((256 << 10) + 1)):
        path.write_bytes(content)
        with pytest.raises(StartupError, match="--chat-template-file"):
            template_in(path)
    with pytest.raises(StartupError, match="cannot be read"):
        template_in(tmp_path / "none")
