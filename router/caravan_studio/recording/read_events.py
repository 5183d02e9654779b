"""Makes events of what a recording has, for the scheduler to hear again."""

import math
from array import array
from collections.abc import Callable
from typing import assert_never

from caravan_proto.messages.commands import RunNote
from caravan_proto.messages.constraint import Constraint, ConstraintKind, Thought
from caravan_proto.messages.media import MediaSpan
from caravan_proto.messages.results import DraftCount, LayoutSet, Loaded, Saved
from caravan_proto.messages.sampling import SamplingParams
from caravan_scheduler import events as heard
from caravan_scheduler.core.generation import (
    BeamSearch,
    Continued,
    EarlyStopping,
    GenerationSpec,
    StoppingParams,
    Tenant,
)
from caravan_scheduler.core.prompt_media import PromptMedia
from caravan_scheduler.core.tokens import Alternative, GeneratedToken, PromptToken
from caravan_scheduler.pins import Pin
from caravan_scheduler.prefix_keys import state_key
from caravan_scheduler.scheduler import Scheduler
from caravan_scheduler.sequence import Request, Sequence
from caravan_studio.recording import events as form
from caravan_studio.recording.names import PlayedNames, contents_of, media_id_of, namespace_of, with_adapter
from caravan_studio.recording.write_events import loaded_keys

_NO_LOGPROB = PromptToken(None, ())


class EventReader:
    """Reads the events of one scheduler. ``take``: returns the requests of these numbers, which left another one."""

    def __init__(
        self, names: PlayedNames, scheduler: Scheduler, take: Callable[[list[int]], tuple[Sequence, ...]]
    ) -> None:
        self._names = names
        self._scheduler = scheduler
        self._take = take

    def read(self, event: form.Event) -> heard.Event:
        """Return the event that the scheduler heard."""
        match event:
            case form.Step():
                return _step(event)
            case form.End():
                return heard.CommandEnded(event.shard, event.command)
            case form.Submit():
                return heard.Submitted(read_request(event))
            case form.Cancel():
                return heard.Cancelled(event.request)
            case form.Conclude():
                return heard.ThoughtEndRequested(event.request)
            case form.Call():
                return heard.ToolsCalled(event.request)
            case form.Replace():
                return heard.Replaced()
            case form.Take():
                return heard.Taken(self._take(event.requests))
            case form.Join():
                return heard.ShardJoined(event.shard, event.limits, self._saved_runs(event.runs), event.survived)
            case form.Found():
                return heard.RunsFound(event.shard, event.run_fingerprint, self._saved_runs(event.runs))
            case form.Lose():
                return heard.ShardLost(event.shard)
            case form.Drain():
                return heard.ShardDraining(event.shard)
            case form.Save():
                return Saved(
                    shard=event.shard,
                    command_id=event.command,
                    saved=event.saved,
                    sizes_bytes=event.sizes_bytes,
                    seconds=event.seconds,
                )
            case form.Load():
                return Loaded(
                    shard=event.shard,
                    command_id=event.command,
                    loaded=event.loaded,
                    bad_runs=self._bad_runs(event),
                    seconds=event.seconds,
                )
            case form.Layout():
                return LayoutSet(
                    shard=event.shard,
                    command_id=event.command,
                    layout=event.layout,
                    lost=event.lost,
                    seconds=event.seconds,
                    shares_beginnings=event.shares_beginnings,
                )
            case form.Fetch():
                return heard.Fetched(transfer_id=event.transfer, fetched=tuple(event.fetched), seconds=event.seconds)
            case form.Encode():
                return heard.Encoded(encode_id=event.encoding, outcome=event.outcome, seconds=event.seconds)
            case form.Flush():
                key = None if event.key is None else self._flushed(event.key)
                return heard.FlushRequested(event.flush, frozenset(event.shards), key)
            case form.Pin():
                return heard.PinRequested(event.pin, self._pin(event))
            case form.Unpin():
                pins = [pin.key for pin in self._scheduler.pins]
                return heard.Unpinned(b"" if event.pin is None else pins[event.pin])
            case form.Grace():
                return heard.GraceChanged(_limit(event.seconds))
            case form.Undone():
                return heard.ActionFailed()
            case form.Tick():
                return heard.Tick()
            case _:
                assert_never(event)

    def _saved_runs(self, runs: list[form.SavedCells]) -> tuple[heard.SavedRun, ...]:
        return tuple(map(self._saved_run, runs))

    def _saved_run(self, run: form.SavedCells) -> heard.SavedRun:
        key_of = self._names.key_of
        before = key_of(run.before)
        for position, number in run.cuts:
            if position == run.start:
                self._names.note_key(number, state_key(before))
        return heard.SavedRun(
            start=run.start,
            cuts=tuple((position, key_of(number)) for position, number in run.cuts),
            size_bytes=run.size_bytes,
            on_disk=run.on_disk,
            is_dropped=run.is_dropped,
            note=RunNote(before=before, tokens=array("i", run.tokens), tenant=run.tenant, adapter=run.adapter),
        )

    def _flushed(self, number: int) -> bytes:
        return b"" if number == form.NO_KEY else self._names.key_of(number)

    def _bad_runs(self, event: form.Load) -> list[bytes]:
        loaded = loaded_keys(self._scheduler, event.shard, event.command)
        return [loaded[place] for place in event.bad_runs]

    def _pin(self, event: form.Pin) -> Pin:
        return Pin(
            key=self._names.key_of(event.key),
            length=event.length,
            tokens=array("i", event.tokens),
            tenant=event.tenant,
            adapter=event.adapter,
            namespace=None if event.namespace is None else with_adapter(namespace_of(event.namespace), event.adapter),
        )


def _limit(seconds: float | None) -> float:
    return math.inf if seconds is None else seconds


def _step(step: form.Step) -> heard.Stepped:
    return heard.Stepped(
        shard=step.shard,
        command_id=step.command,
        outcome=step.outcome,
        tokens=tuple(
            [(one.sequence, GeneratedToken(one.token, b"", False, None, (), one.finish)) for one in step.tokens]
        ),
        seconds=step.seconds,
        forward_s=step.forward_s,
        sample_s=step.sample_s,
        prompt_logprobs=tuple((sequence, (_NO_LOGPROB,) * count) for sequence, count in step.prompt_logprobs),
        drafts=tuple(
            (sequence, DraftCount(source, drafted, accepted)) for sequence, source, drafted, accepted in step.drafts
        ),
        evaluations=tuple(
            (
                sequence,
                tuple(
                    Alternative(token, b"", False, -math.inf if logprob is None else logprob)
                    for token, logprob in likeliest
                ),
            )
            for sequence, likeliest in step.evaluations
        ),
        feedback=tuple(step.feedback),
        missing_media=tuple(map(media_id_of, step.missing)),
        without_logits=tuple(step.without_logits),
    )


def read_request(event: form.Submit) -> Request:
    """Return the request that was submitted."""
    return Request(
        request_id=event.request,
        spec=_spec(event.spec),
        arrived_s=event.arrived_s,
        start_by_s=_limit(event.start_by_s),
        end_by_s=_limit(event.end_by_s),
    )


def _spec(spec: form.Spec) -> GenerationSpec:
    beams = spec.beams
    return GenerationSpec(
        prompt=tuple(spec.prompt),
        sampling=SamplingParams(logprobs=spec.logprobs, top_n_tokens=spec.top_n_tokens),
        stopping=StoppingParams(
            max_new_tokens=spec.most,
            ignore_eos=spec.ignore_eos,
            stop_token_ids=frozenset(spec.stop),
            min_tokens=spec.least,
        ),
        priority=spec.priority,
        tenant=Tenant(name=spec.tenant, weight=spec.weight),
        session=spec.session,
        namespace=namespace_of(spec.namespace),
        constraint=Constraint(ConstraintKind.REGEX, str(spec.constraint)) if spec.constraint else None,
        adapter=spec.adapter,
        prompt_logprobs=spec.prompt_logprobs,
        timeout_s=_limit(spec.timeout_s),
        max_draft_tokens=spec.drafts,
        prediction=tuple(spec.prediction),
        continued=Continued(token_ids=tuple(spec.continued)) if spec.continued else None,
        beams=None
        if beams is None
        else BeamSearch(
            width=beams.width,
            index=beams.index,
            length_penalty=beams.length_penalty,
            early_stopping=EarlyStopping[beams.early_stopping],
            eos_token_ids=frozenset(beams.eos),
        ),
        thought=_thought(spec) if spec.thought else None,
        media=None if spec.media is None else _media(spec.media),
        keep_s=spec.keep_s,
    )


def _thought(spec: form.Spec) -> Thought:
    # No token of the ending matters, but that there is one.
    return Thought(closings=(), ending=(0,) if spec.ends_thought else (), max_tokens=spec.most_thought)


def _media(media: form.Media) -> PromptMedia:
    return PromptMedia(
        spans=tuple(
            MediaSpan(
                offset=offset,
                media_id=media_id_of(number),
                slice_index=slice_index,
                first=first,
                count=count,
                positions=positions,
            )
            for offset, number, slice_index, first, count, positions in media.spans
        ),
        contents=contents_of(media.contents),
        encoder=media_id_of(media.encoder),
        atomic=media.atomic,
    )
