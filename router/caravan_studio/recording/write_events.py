"""Writes what the scheduler hears in the form of a recording."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import assert_never

from caravan_proto.messages.commands import Load
from caravan_proto.messages.results import LayoutSet, Loaded, Saved
from caravan_scheduler import events as heard
from caravan_scheduler.core.generation import GenerationSpec
from caravan_scheduler.core.prompt_media import PromptMedia
from caravan_scheduler.pins import Pin
from caravan_scheduler.scheduler import Scheduler
from caravan_scheduler.sequence import Request
from caravan_studio.recording import events as form
from caravan_studio.recording.names import Names, keys_of, media_id_of


class EventWriter:
    """Writes events that one scheduler is about to hear."""

    def __init__(self, names: Names, scheduler: Scheduler) -> None:
        self._names = names
        self._scheduler = scheduler

    def write(self, event: heard.Event) -> form.Event:
        """Return the event with other names."""
        names = self._names
        match event:
            case heard.Stepped():
                return self._step(event)
            case heard.CommandEnded():
                return form.End(event.shard, event.command_id)
            case heard.Submitted():
                return self._submit(event.request)
            case heard.Cancelled():
                return form.Cancel(event.request_id)
            case heard.ThoughtEndRequested():
                return form.Conclude(event.request_id)
            case heard.ToolsCalled():
                return form.Call(event.request_id)
            case heard.Replaced():
                return form.Replace()
            case heard.Taken():
                return form.Take([sequence.request_id for sequence in event.sequences])
            case heard.ShardJoined():
                limits = replace(
                    event.limits,
                    end_tokens=frozenset(names.tokens(sorted(event.limits.end_tokens))),
                    encoder=media_id_of(names.medium(event.limits.encoder)),
                )
                return form.Join(event.shard, limits, self._runs(event.runs), event.survived)
            case heard.RunsFound():
                return form.Found(event.shard, event.run_fingerprint, self._runs(event.runs))
            case heard.ShardLost():
                return form.Lose(event.shard)
            case heard.ShardDraining():
                return form.Drain(event.shard)
            case Saved():
                saved, sizes = list(event.saved), list(event.sizes_bytes)
                return form.Save(event.shard, event.command_id, saved, sizes, event.seconds)
            case Loaded():
                loaded = loaded_keys(self._scheduler, event.shard, event.command_id)
                bad = [loaded.index(key) for key in event.bad_runs if key in loaded]
                return form.Load(event.shard, event.command_id, list(event.loaded), bad, event.seconds)
            case LayoutSet():
                lost, shares = list(event.lost), event.shares_beginnings
                return form.Layout(event.shard, event.command_id, event.layout, lost, event.seconds, shares)
            case heard.Fetched():
                return form.Fetch(event.transfer_id, list(event.fetched), event.seconds)
            case heard.Encoded():
                return form.Encode(event.encode_id, event.outcome, event.seconds)
            case heard.FlushRequested():
                key = None if event.key is None else self._flushed(event.key)
                return form.Flush(event.flush_id, sorted(event.shards), key)
            case heard.PinRequested():
                return self._pin(event.pin_id, event.pin)
            case heard.Unpinned():
                pins = [pin.key for pin in self._scheduler.pins]
                return form.Unpin(pins.index(event.key) if event.key in pins else None)
            case heard.GraceChanged():
                return form.Grace(_finite(event.seconds))
            case heard.ActionFailed():
                return form.Undone()
            case heard.Tick():
                return form.Tick()
            case _:
                assert_never(event)

    def _step(self, step: heard.Stepped) -> form.Step:
        token = self._names.token
        return form.Step(
            step.shard,
            step.command_id,
            step.outcome,
            step.seconds,
            step.forward_s,
            step.sample_s,
            [form.Sampled(sequence, token(one.token_id), one.finish) for sequence, one in step.tokens],
            [(sequence, len(tokens)) for sequence, tokens in step.prompt_logprobs],
            [(sequence, *count) for sequence, count in step.drafts],
            [
                (sequence, [(token(one.token_id), _finite(one.logprob)) for one in likeliest])
                for sequence, likeliest in step.evaluations
            ],
            list(step.feedback),
            [self._names.medium(media_id) for media_id in step.missing_media],
            list(step.without_logits),
        )

    def _submit(self, request: Request) -> form.Submit:
        return form.Submit(
            request.request_id,
            request.arrived_s,
            _finite(request.start_by_s),
            _finite(request.end_by_s),
            self._spec(request.spec, self._names.namespace(request.prefix_namespace)),
        )

    def _spec(self, spec: GenerationSpec, namespace: int) -> form.Spec:
        names, beams = self._names, spec.beams
        return form.Spec(
            prompt=names.tokens(spec.prompt),
            namespace=namespace,
            most=spec.stopping.max_new_tokens,
            tenant=names.tenant(spec.tenant.name),
            session=names.session(spec.session),
            weight=spec.tenant.weight,
            priority=spec.priority,
            adapter=spec.adapter,
            least=spec.stopping.min_tokens,
            ignore_eos=spec.stopping.ignore_eos,
            stop=names.tokens(sorted(spec.stopping.stop_token_ids)),
            logprobs=spec.sampling.logprobs,
            top_n_tokens=spec.sampling.top_n_tokens,
            prompt_logprobs=spec.prompt_logprobs,
            timeout_s=_finite(spec.timeout_s),
            drafts=spec.max_draft_tokens,
            prediction=names.tokens(spec.prediction),
            continued=[] if spec.continued is None else names.tokens(spec.continued.token_ids),
            constraint=0 if spec.constraint is None else names.constraint(spec.constraint),
            thought=0 if spec.thought is None else names.constraint(spec.thought),
            most_thought=None if spec.thought is None else spec.thought.max_tokens,
            ends_thought=spec.thought is not None and bool(spec.thought.ending),
            beams=None
            if beams is None
            else form.Beams(
                width=beams.width,
                index=beams.index,
                length_penalty=beams.length_penalty,
                early_stopping=beams.early_stopping.name,  # type: ignore[arg-type]  # mypy knows it as a text
                eos=names.tokens(sorted(beams.eos_token_ids)),
            ),
            media=None if spec.media is None else self._media(spec.media),
            keep_s=spec.keep_s,
        )

    def _media(self, media: PromptMedia) -> form.Media:
        medium = self._names.medium
        return form.Media(
            [
                (span.offset, medium(span.media_id), span.slice_index, span.first, span.count, span.positions)
                for span in media.spans
            ],
            [medium(media_id) for media_id in media.contents],
            medium(media.encoder),
            media.atomic,
        )

    def _runs(self, runs: Sequence[heard.SavedRun]) -> list[form.SavedCells]:
        return [self._run(run) for run in runs]

    def _run(self, run: heard.SavedRun) -> form.SavedCells:
        names = self._names
        is_state = run.start == run.cuts[-1][0]  # whose key is made of that of its prefix
        return form.SavedCells(
            run.start,
            [(position, names.key(key) if is_state else names.heard_key(key, position)) for position, key in run.cuts],
            run.size_bytes,
            run.on_disk,
            run.is_dropped,
            names.heard_key(run.note.before, run.start),
            names.tokens(run.note.tokens),
            names.tenant(run.note.tenant),
            run.note.adapter,
        )

    def _flushed(self, key: bytes) -> int:
        """Return the number of a key that shards may know by no more than the tokens in their cells."""
        for shard in self._scheduler.shards.values():
            for resident in (*shard.stays.parked.values(), *shard.stays.residents.values()):
                if resident.prefix_key == key:
                    return self._names.heard_key(key, resident.computed)
        return self._names.key(key) if self._names.knows_key(key) else form.NO_KEY

    def _pin(self, pin_id: int, pin: Pin) -> form.Pin:
        names = self._names
        return form.Pin(
            pin_id,
            names.heard_key(pin.key, pin.length),
            pin.length,
            names.tokens(pin.tokens),
            None if pin.namespace is None else names.namespace(pin.namespace),
            names.tenant(pin.tenant),
            pin.adapter,
        )


def loaded_keys(scheduler: Scheduler, shard_name: str, command_id: int) -> list[bytes]:
    """Return the keys of all that a Load under way loads; none if it is not there."""
    shard = scheduler.shards.get(shard_name)
    begun = None if shard is None else shard.commands.find(command_id)
    return [] if begun is None or not isinstance(begun.command, Load) else keys_of(begun.command)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
