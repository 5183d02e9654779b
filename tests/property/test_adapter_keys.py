"""Keys of adapters that are loaded at run time: equal for equal adapters, and for no others."""

import hashlib
from collections.abc import Sequence

from hypothesis import example, given
from hypothesis import strategies as st

from caravan_proto.messages.adapters import (
    AdapterSource,
    adapter_key,
    adapter_name,
    is_adapter_name,
    is_loaded_key,
    source_problem,
)

NAMES = st.sampled_from(["a", "b", "a\u00a0b", "poet", "poet-1.0"]) | st.text(min_size=1, max_size=8)
BYTES = st.sampled_from([b"", b"a", b"1.0", b"a\n1.0"]) | st.binary(max_size=8)
SCALES = st.sampled_from([1.0, -1.0, 0.1, 0.1 + 2**-56, 0.0, -0.0, 1000.0]) | st.floats(-1000.0, 1000.0)
ADAPTERS = st.tuples(NAMES.filter(is_adapter_name), BYTES, SCALES)
Adapter = tuple[str, bytes, float]


def key_of(adapter: Adapter, path: str = "a.gguf") -> str:
    name, content, scale = adapter
    source = AdapterSource(name=name, path=path, scale=scale)
    assert source_problem(source) == ""
    return adapter_key(source, hashlib.sha256(content).hexdigest())


@given(st.lists(ADAPTERS, min_size=2, max_size=8))
@example([("a", b"x", 0.0), ("a", b"x", -0.0)])
@example([("a", b"x", 0.1), ("a", b"x", 0.1 + 2**-56)])
def test_keys_are_equal_if_name_bytes_and_scale_are(adapters: Sequence[Adapter]) -> None:
    for one in adapters:
        for other in adapters:
            assert (key_of(one) == key_of(other)) == (one == other), (one, other)


@given(ADAPTERS)
def test_a_key_tells_its_name_and_that_it_was_loaded_and_nothing_of_the_path(adapter: Adapter) -> None:
    key = key_of(adapter)
    assert (adapter_name(key), is_loaded_key(key)) == (adapter[0], True)
    assert key_of(adapter, "other/place.gguf") == key
    # So no name is a key of another adapter.
    assert not is_adapter_name(key)
