"""Samples a token for each sequence of a step, ends the sequences that are complete, and fills the reply's columns.

Drafts are verified by it: it samples behind each draft token that equals the token sampled before it.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from caravan_proto.messages.results import FinishReason
from caravan_shard.arrays import Floats
from caravan_shard.backends.base import Backend
from caravan_shard.engine.step import Part
from caravan_shard.protocol.results import DraftRows, TokenRows
from caravan_shard.sampling.choice import Choice
from caravan_shard.sampling.joint_draw import LEFT
from caravan_shard.sampling.logprobs import NO_LOGPROBS, LogprobRow
from caravan_shard.sampling.peaks import has_peak, rows_without_numbers
from caravan_shard.sampling.sampler import Sampler
from caravan_shard.sampling.top_candidates import StepCandidates, draw_from
from caravan_shard.sequences.sequence import Phase, log_traced
from caravan_shard.sequences.sequence import Sequence as ShardSequence


def sample_rows(sequences: Sequence[ShardSequence], logits: Floats, backend: Backend, sampler: Sampler) -> TokenRows:
    """Append a token to each sequence, from its row of ``logits`` [sequences, vocabulary], and return the columns."""
    rows = TokenRows()
    add_rows(rows, sequences, logits, backend, sampler)
    return rows


def add_rows(
    rows: TokenRows, sequences: Sequence[ShardSequence], logits: Floats, backend: Backend, sampler: Sampler
) -> list[int]:
    """Append a token to each sequence as `sample_rows` does, and to the columns; return the tokens.

    ``rows`` are empty, or those of other tokens of these sequences, and maybe of others, in the same step.
    """
    eog_ids = backend.facts.eos_token_ids
    choices = [_choice(sequence, eog_ids, logits[index]) for index, sequence in enumerate(sequences)]
    tokens = sampler.choose(logits, choices)
    drawn = _Drawn(tokens, choices, logits)
    if broken := rows_without_numbers(logits, tokens):
        sequences, drawn = _without_broken(rows, sequences, drawn, broken)
    _append(rows, sequences, drawn, backend, sampler)
    return tokens


def sample_candidates(
    sequences: Sequence[ShardSequence], found: StepCandidates, backend: Backend, sampler: Sampler
) -> TokenRows:
    """Do what `sample_rows` does where rows have candidates."""
    eog_ids = backend.facts.eos_token_ids
    choices = [_choice(sequence, eog_ids, found.logits[index]) for index, sequence in enumerate(sequences)]
    tokens = draw_from(found.rows, choices, sampler)
    left = [index for index, token in enumerate(tokens) if token == LEFT]
    logits = found.logits
    if left:
        if any(found.rows[index] is not None for index in left):
            logits = backend.logits(len(sequences))
        chosen = sampler.choose(logits[left], [choices[index] for index in left])
        for index, token in zip(left, chosen, strict=True):
            tokens[index] = token
    rows = TokenRows()
    # Rows whose candidates give the token have a peak.
    drawn = _Drawn(tokens, choices, logits)
    if left and (broken := rows_without_numbers(logits[left], [tokens[index] for index in left])):
        sequences, drawn = _without_broken(rows, sequences, drawn, [left[row] for row in broken])
    _append(rows, sequences, drawn, backend, sampler)
    return rows


class _Drawn(NamedTuple):
    """The tokens of a step, and what they were drawn from: ``logits`` are valid where log probabilities are needed."""

    tokens: Sequence[int]
    choices: Sequence[Choice]
    logits: Floats


def _without_broken(
    rows: TokenRows, sequences: Sequence[ShardSequence], drawn: _Drawn, broken: Sequence[int]
) -> tuple[Sequence[ShardSequence], _Drawn]:
    """End the sequences in the places ``broken``, whose logits are no numbers. Return the others."""
    for row in broken:
        sequences[row].end()
        log_traced(sequences[row], "the model computed no finite logits")
        rows.without_logits.append(sequences[row].sequence_id)
    kept = [row for row in range(len(sequences)) if row not in broken]
    left = _Drawn([drawn.tokens[row] for row in kept], [drawn.choices[row] for row in kept], drawn.logits[kept])
    return [sequences[row] for row in kept], left


def _append(
    rows: TokenRows, sequences: Sequence[ShardSequence], drawn: _Drawn, backend: Backend, sampler: Sampler
) -> None:
    """Append the tokens to the sequences and to the columns."""
    eog_ids = backend.facts.eos_token_ids
    tokens, choices, logits = drawn
    wanted = [
        LogprobRow(place, token, choice.parameters.top_n_tokens, choice.parameters.score_token_ids)
        for place, (token, choice) in enumerate(zip(tokens, choices, strict=True))
        if choice.parameters.logprobs
    ]
    with_logprobs = bool(rows.logprobs) or bool(wanted)
    logprobs = iter(sampler.logprobs(logits, wanted))
    if rows.feedback or any(choice.feedback is not None for choice in choices):
        rows.feedback += [math.nan] * (len(rows.token_ids) - len(rows.feedback))
        rows.feedback += [math.nan if choice.feedback is None else choice.feedback.value for choice in choices]
    rows.token_ids += tokens
    for index, sequence in enumerate(sequences):
        token = tokens[index]
        piece = backend.vocabulary.piece(token)
        sequence.extend((token,))
        reason = _finish_reason(sequence, token, eog_ids)
        if reason is None:
            sequence.phase = Phase.RUNNING
        else:
            sequence.end()
            log_traced(sequence, "sequence ended", reason=reason.value)
        rows.sequence_ids.append(sequence.sequence_id)
        rows.pieces.append(piece.data)
        rows.specials.append(piece.special)
        rows.finish_reasons.append(reason)
        if with_logprobs:
            asked = choices[index].parameters.logprobs
            rows.add(next(logprobs) if asked else NO_LOGPROBS)
    rows.add_pieces(backend.vocabulary)


def _choice(sequence: ShardSequence, eog_ids: frozenset[int], logits: Floats) -> Choice:
    parameters = sequence.parameters
    position = len(sequence.tokens)
    matching = sequence.matching
    allowed = None if matching is None else matching.allowed
    barred: frozenset[int] = frozenset()
    if position < parameters.prompt_length + parameters.min_tokens:
        barred = eog_ids | parameters.stop_token_ids
    elif matching is not None and (matching.needs_more or (parameters.ignore_eos and matching.has_grammar)):
        barred = eog_ids
    processed = None
    if parameters.processors is not None and has_peak(logits):
        processed = parameters.processors.apply(sequence.tokens[parameters.prompt_length :], logits)
    return Choice(
        parameters.sampling,
        position,
        sequence.penalties,
        allowed,
        barred,
        processed,
        sequence.feedback,
        sequence.biases,
    )


def _finish_reason(sequence: ShardSequence, token: int, eog_ids: frozenset[int]) -> FinishReason | None:
    matching = sequence.matching
    if matching is not None:
        # A matching that failed leaves an output that is at best the beginning of one that matches.
        if matching.failed:
            return FinishReason.CONSTRAINT_FAILED
        if token in eog_ids and matching.has_grammar:
            return FinishReason.EOS_TOKEN
        matching.advance(token)
        if matching.failed:
            return FinishReason.CONSTRAINT_FAILED
        if matching.ended:
            return FinishReason.EOS_TOKEN
    parameters = sequence.parameters
    # Nobody gets a token that was chosen without the functions.
    if parameters.processors is not None and parameters.processors.ended:
        return FinishReason.LENGTH
    length = len(sequence.tokens)
    if token in eog_ids and not parameters.ignore_eos:
        return FinishReason.EOS_TOKEN
    if token in parameters.stop_token_ids and length > parameters.prompt_length + parameters.min_tokens:
        return FinishReason.STOP_TOKEN
    if length >= parameters.max_length:
        return FinishReason.LENGTH
    return None


def verify_drafts(
    parts: Sequence[Part], logits: Floats, backend: Backend, sampler: Sampler
) -> tuple[TokenRows, DraftRows]:
    """Append to each sequence the tokens that it would get in steps without drafts; return the columns.

    ``logits`` [tokens, vocabulary] are those after each token of ``parts``, which all decode. The logits after a draft
    token count only if the tokens before it are those of the sequence. So a token is chosen from the same logits, with
    the same history, number and constraint as without drafts.
    """
    rows = TokenRows()
    starts = [0, *accumulate(len(part.tokens) for part in parts)]
    accepted = [0] * len(parts)
    going = list(range(len(parts)))
    place = 0
    while going:
        for index in going if place else ():
            matching = parts[index].sequence.matching
            if matching is not None:
                matching.find(())
        going_logits = logits[[starts[index] + place for index in going]]
        tokens = add_rows(rows, [parts[index].sequence for index in going], going_logits, backend, sampler)
        place += 1
        right = [
            index
            for index, token in zip(going, tokens, strict=True)
            if place < len(parts[index].tokens) and parts[index].tokens[place] == token
        ]
        for index in right:
            accepted[index] = place
        going = [index for index in right if parts[index].sequence.phase is Phase.RUNNING]
    return rows, _draft_rows(parts, accepted)


def _draft_rows(parts: Sequence[Part], accepted: Sequence[int]) -> DraftRows:
    columns = DraftRows()
    for part, count in zip(parts, accepted, strict=True):
        if part.draft is not None:
            columns.sequence_ids.append(part.sequence.sequence_id)
            columns.sources.append(part.draft.kind.source)
            columns.drafted.append(len(part.draft.tokens))
            columns.accepted.append(count)
    return columns
