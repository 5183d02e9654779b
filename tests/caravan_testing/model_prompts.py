"""How prompts and rows begin on a shard of the simulation: what the contract demands, and what they find there."""

from caravan_proto.messages.commands import Chunk, Row
from caravan_scheduler.core.tokens import PromptToken
from caravan_testing.model_held import Held, HeldCells, ended_parameters
from caravan_testing.model_media import tokens_of
from caravan_testing.model_outputs import NO_LOGPROB, prompt_logprobs_of


def check_chunk(cells: HeldCells, chunk: Chunk, taken_over: set[int]) -> None:
    """Fail if a chunk may not come now. ``taken_over``: the ids whose sequences this step ends and begins anew."""
    assert chunk.sequence_id < cells.limits.max_sequences
    assert chunk.token_ids, "an empty chunk"
    cells.check_spans(chunk)
    if chunk.setup is None:
        held = cells.sequences[chunk.sequence_id]
        assert chunk.start == len(held.tokens)
        assert not held.pending
        assert not held.ended
        return
    if chunk.copy is None:
        assert chunk.sequence_id not in cells.sequences, f"sequence {chunk.sequence_id} exists"
        assert chunk.start == 0
        return
    assert chunk.start == chunk.copy.length
    if chunk.copy.source_id != chunk.sequence_id:
        assert chunk.sequence_id not in cells.sequences, f"sequence {chunk.sequence_id} exists"
        assert chunk.copy.source_id not in taken_over, "copied from one that is taken over"


def new_of_chunk(cells: HeldCells, chunk: Chunk) -> Held:
    """Return the sequence that a first chunk begins, without the chunk."""
    assert chunk.setup is not None
    if chunk.copy is None:
        return Held(chunk.setup)
    return cells.copied(chunk.copy, chunk.sequence_id, chunk.setup)


def new_of_row(cells: HeldCells, row: Row, taken_over: set[int]) -> Held:
    """Return the sequence that a row begins, without the row."""
    assert row.sequence_id < cells.limits.max_sequences
    setup = ended_parameters(row.adapter)
    if row.copy is None:
        assert row.sequence_id not in cells.sequences, f"sequence {row.sequence_id} exists"
        return Held(setup, ended=True)
    if row.copy.source_id != row.sequence_id:
        assert row.sequence_id not in cells.sequences, f"sequence {row.sequence_id} exists"
        assert row.copy.source_id not in taken_over, "copied from one that is taken over"
    held = cells.copied(row.copy, row.sequence_id, setup)
    held.ended = True
    return held


def logprobs_of_chunk(cells: HeldCells, chunk: Chunk) -> tuple[int, tuple[PromptToken, ...]]:
    """Return the id of a chunk's sequence, and the logprobs of the chunk's tokens."""
    assert len(chunk.token_ids) <= cells.limits.max_prompt_logprob_tokens
    held = cells.sequences[chunk.sequence_id]
    prompt = [*held.tokens, *tokens_of(chunk)][: held.setup.prompt_length]
    logprobs = prompt_logprobs_of(prompt, held.setup.adapter)
    found = logprobs[chunk.start : chunk.start + len(chunk.token_ids)]
    return chunk.sequence_id, found if chunk.copy is None else (NO_LOGPROB, *found[1:])
