"""Which server a command means, and under which names a server may list a model."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from caravan_serve.servers import DEFAULT_URL, Server, names_of, server_of, state_folder


@pytest.mark.parametrize(
    ("url", "key", "environ", "server", "named"),
    [
        ("", "", {}, Server(DEFAULT_URL), False),
        ("", "", {"CARAVAN_SERVER": "http://a:1"}, Server("http://a:1"), True),
        ("http://b:2/", "", {"CARAVAN_SERVER": "http://a:1"}, Server("http://b:2"), True),
        ("https://b/v1", "k", {"CARAVAN_API_KEY": "other"}, Server("https://b", "k"), True),
        ("b:2", "", {"CARAVAN_API_KEY": "other"}, Server("http://b:2", "other"), True),
    ],
)
def test_a_flag_comes_before_a_variable_and_that_before_the_default(
    url: str, key: str, environ: Mapping[str, str], server: Server, named: bool
) -> None:
    assert server_of(url, key, environ) == (server, named)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("smollm2:135m", {"smollm2:135m"}),
        ("hf:owner/repo:q8_0", {"owner/repo:Q8_0", "hf:owner/repo:Q8_0"}),
        ("hf.co/owner/repo", {"owner/repo", "hf:owner/repo"}),
        ("models/a.gguf", {"models/a.gguf", "a.gguf", "a"}),
        ("an alias", {"an alias"}),
    ],
)
def test_a_model_is_looked_for_under_all_its_names(text: str, names: set[str]) -> None:
    assert names <= set(names_of(text))


def test_what_commands_remember_is_where_xdg_says() -> None:
    assert state_folder({"XDG_STATE_HOME": "/s"}) == Path("/s/caravan")
    assert state_folder({}) == Path.home() / ".local/state/caravan"
