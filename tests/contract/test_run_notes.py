"""What the router notes of a saved run comes back from the shard: through both encoders and decoders."""

from array import array

from caravan_proto.messages.commands import RunNote, Save, SaveEntry
from caravan_proto.shard.v1 import shard_pb2
from caravan_proto.wire import SAVE, encode_command
from caravan_router.engine.reply_codec import saved_runs
from caravan_scheduler.events import SavedRun
from caravan_shard.protocol.commands import StoredRun
from caravan_shard.service.codec import runs_responses

NOTE = RunNote(before=bytes(16), tokens=array("i", [5, 0, 262_143]), tenant="Zoë", adapter="pirate")


def test_a_note_comes_back_as_it_was() -> None:
    cuts = ((16, b"k" * 16), (19, b"l" * 16))
    entry = SaveEntry(sequence_id=1, start=16, cuts=cuts[1:], release=False, note=NOTE)
    sent = encode_command(Save(entries=(entry,)), epoch=1)
    [received] = SAVE.decode(shard_pb2.SaveRequest.FromString(sent.SerializeToString())).entries
    positions, keys = zip(*received.cuts, strict=True)
    run = StoredRun(start=received.start, cuts=positions, keys=keys, size=7, note=received.kept_note)
    [message] = runs_responses([(run, True)])
    [listed] = saved_runs(shard_pb2.ListRunsResponse.FromString(message.SerializeToString()))
    assert listed == SavedRun(start=16, cuts=cuts[1:], size_bytes=7, on_disk=True, note=NOTE)
