"""The cached and pinned prefixes of one model, which the scheduler is asked for."""

import asyncio
import hashlib
import itertools
import re
from array import array
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import replace

from caravan_scheduler.actions import Flushed, PinAnswered
from caravan_scheduler.core.engine import ModelFacts
from caravan_scheduler.core.generation import GenerationSpec
from caravan_scheduler.core.prefixes import CachedPrefix, PinRefusal, PrefixReport, ShardPrefixes
from caravan_scheduler.events import Event, FlushRequested, PinRequested, Unpinned
from caravan_scheduler.pins import Pin
from caravan_scheduler.scheduler import Scheduler
from caravan_scheduler.sequence import Request, Sequence
from caravan_scheduler.shard.remembered import prefixes_of, running_on, tokens_of

_TAG_BYTES = 4
_KEY_DIGITS = re.compile(r"[0-9a-f]{32}")


class ModelPrefixes:
    """Reads what ``scheduler`` knows, and asks it by events that ``post`` takes; `note` gets its answers."""

    def __init__(self, facts: ModelFacts, scheduler: Scheduler, post: Callable[[Event], None]) -> None:
        self._model = facts.name
        self._scheduler = scheduler
        self._post = post
        self._flushes: dict[int, asyncio.Future[tuple[ShardPrefixes, ...]]] = {}
        self._pins_asked: dict[int, asyncio.Future[PinRefusal | None]] = {}
        self._ids = itertools.count(1)
        # What the ids of its prefixes begin with: models whose tokens mean the same have the same keys.
        self._tag = hashlib.blake2b(f"{facts.fingerprint}{facts.sha256}".encode(), digest_size=_TAG_BYTES).hexdigest()

    def note(self, answer: Flushed | PinAnswered) -> None:
        """Hand the scheduler's answer to who asked, unless they gave up waiting."""
        match answer:
            case Flushed():
                if (waiter := self._flushes.get(answer.flush_id)) is not None and not waiter.done():
                    waiter.set_result(answer.evicted)
            case PinAnswered():
                if (asker := self._pins_asked.get(answer.pin_id)) is not None and not asker.done():
                    asker.set_result(answer.refusal)

    def cached_prefixes(self) -> list[ShardPrefixes]:
        """Return what each leased shard keeps of ended sequences, and its running sequences."""
        shards = self._scheduler.shards.values()
        return [replace(prefixes_of(shard), model_tag=self._tag, running=running_on(shard)) for shard in shards]

    async def flush_prefixes(self, shards: Collection[str], key: bytes | None = None) -> tuple[ShardPrefixes, ...]:
        """Evict all that ``shards`` keep of ended sequences, and return it. Shards that are not leased are left out.

        ``key``: the prefix to evict; None for all.
        """
        flush_id = next(self._ids)
        waiter: asyncio.Future[tuple[ShardPrefixes, ...]] = asyncio.get_running_loop().create_future()
        self._flushes[flush_id] = waiter
        self._post(FlushRequested(flush_id, frozenset(shards), key))
        try:
            return tuple(replace(evicted, model_tag=self._tag) for evicted in await waiter)
        finally:
            del self._flushes[flush_id]

    def key_of(self, prefix_id: str) -> bytes | None:
        """Return the key of the prefix that ``prefix_id`` names; None if it is no id of this model's."""
        tag, digits = prefix_id[: len(self._tag)], prefix_id[len(self._tag) :]
        return bytes.fromhex(digits) if tag == self._tag and _KEY_DIGITS.fullmatch(digits) else None

    def find_prefix(self, key: bytes) -> PrefixReport | None:
        """Return the prefix that ``key`` names; None if no shard has it and it is not pinned."""
        shards = self._scheduler.shards.values()
        return self._report_on(key, [prefixes_of(shard, key) for shard in shards])

    async def drop_prefix(self, key: bytes) -> PrefixReport | None:
        """Evict the prefix that ``key`` names from all shards, and pin it no longer. Return it as it was, if it was.

        What other prefixes begin with is kept.
        """
        before = self.find_prefix(key)
        evicted = await self.flush_prefixes(self._scheduler.shards, key)
        return None if before is None else replace(before, places=_places(evicted))

    def pins(self) -> list[PrefixReport]:
        """Return the pinned prefixes, the first pinned first."""
        found = [self.find_prefix(pin.key) for pin in self._scheduler.pins]
        return [report for report in found if report is not None]

    async def pin_prefix(self, key: bytes) -> PrefixReport | PinRefusal | None:
        """Let a prefix stay that a shard has. Return it, or why not; None if no shard has it and it is not pinned."""
        report = self.find_prefix(key)
        if report is None:
            return None
        pin = Pin(
            key=key,
            length=report.tokens,
            tokens=array("i", report.token_ids or ()),
            tenant=report.tenant,
            adapter=report.adapter,
        )
        return await self._pin(pin) or self.find_prefix(key)

    def unpin_prefix(self, key: bytes) -> PrefixReport | None:
        """Let a prefix make way for others again, and return it; None if it is not pinned."""
        if self._scheduler.pins.get(key) is None:
            return None
        report = self.find_prefix(key)
        self._post(Unpinned(key))
        return None if report is None else replace(report, pinned=False)

    async def pin_computed(
        self, spec: GenerationSpec, compute: Callable[[], Awaitable[None]]
    ) -> PrefixReport | PinRefusal:
        """Let the prompt of ``spec`` stay, which ``compute`` computes where that is needed. Return it, or why not."""
        request = Request(request_id=0, spec=spec)
        keys = Sequence(request).keys
        pin = Pin(
            key=keys.at(len(spec.prompt)),
            length=len(spec.prompt),
            tokens=array("i", spec.prompt),
            tenant=spec.tenant.name,
            adapter=spec.adapter,
            namespace=request.prefix_namespace,
        )
        is_new = self._scheduler.pins.get(pin.key) is None
        try:
            if (refusal := await self._pin(pin)) is not None:
                return refusal
            await compute()
        except BaseException:
            if is_new:
                self._post(Unpinned(pin.key))
            raise
        report = self.find_prefix(pin.key)
        assert report is not None, f"the pin {pin.key.hex()} is gone"
        return report

    async def _pin(self, pin: Pin) -> PinRefusal | None:
        pin_id = next(self._ids)
        waiter: asyncio.Future[PinRefusal | None] = asyncio.get_running_loop().create_future()
        self._pins_asked[pin_id] = waiter
        self._post(PinRequested(pin_id, pin))
        try:
            return await waiter
        finally:
            del self._pins_asked[pin_id]

    def _report_on(self, key: bytes, found: Iterable[ShardPrefixes]) -> PrefixReport | None:
        places, pin = _places(found), self._scheduler.pins.get(key)
        if not places and pin is None:
            return None
        tokens = (tokens_of(shard, key) for shard in self._scheduler.shards.values())
        known = next(filter(None, tokens), None) or (tuple(pin.tokens) if pin is not None else ())
        return PrefixReport(
            prefix_id=self._tag + key.hex(),
            model=self._model,
            tokens=places[0][1].tokens if pin is None else pin.length,
            tenant=places[0][1].tenant if pin is None else pin.tenant,
            adapter=places[0][1].adapter if pin is None else pin.adapter,
            pinned=pin is not None,
            places=places,
            token_ids=known or None,
        )


def _places(found: Iterable[ShardPrefixes]) -> tuple[tuple[str, CachedPrefix], ...]:
    return tuple((one.shard, prefix) for one in found for prefix in one.prefixes)
