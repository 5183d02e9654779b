"""Which servers and rows the kit compares."""

from pathlib import Path

import pytest
from bench.rows import OVERHEAD_ROWS
from gpu.kit import rows
from gpu.kit.rows import DEFAULT, DEVICE_SAMPLING, KINDS, STREAMS, lineup, peer_groups

from caravan_shard.backends.llama.devices.devices import Device

GIB = 1 << 30


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A file of 17 GiB that takes no place on the disk."""
    path = tmp_path / "model.gguf"
    with path.open("wb") as file:
        file.truncate(17 * GIB)
    return path


def test_peers_are_resident_together_if_the_card_has_the_memory(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together, in_turn = [(DEFAULT, DEVICE_SAMPLING)], [(DEFAULT,), (DEVICE_SAMPLING,)]
    for card_gib, groups in ((80, together), (48, in_turn)):
        card = Device("CUDA0", "a card", card_gib * GIB, None)
        monkeypatch.setattr(rows, "first_devices", lambda card=card: [card])
        assert list(peer_groups(model)) == groups
    monkeypatch.setattr(rows, "first_devices", list)
    assert list(peer_groups(model)) == together  # on the CPU


def test_one_peer_samples_on_the_device() -> None:
    servers = lineup(8, 8192, (DEFAULT, DEVICE_SAMPLING))
    assert servers.ours.flags == ()
    assert [peer.flags for peer in servers.peers] == [(), ("--backend-sampling",)]


def test_every_row_is_there() -> None:
    wanted = {f"{kind}-streamed-{streams}" for kind in KINDS for streams in STREAMS}
    assert wanted <= {row.name for row in OVERHEAD_ROWS}
