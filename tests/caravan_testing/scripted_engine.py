"""An engine whose streams follow a script that the test gives. It is a fleet of one model, too."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from caravan_proto.messages.adapters import AdapterSource, adapter_key, source_problem
from caravan_proto.messages.constraint import Constraint
from caravan_proto.messages.media import MediaFacts, MediaSpan, TokenizedParts
from caravan_proto.messages.model import FillTokens, TokenizedText
from caravan_proto.messages.results import DraftCount, FinishReason
from caravan_scheduler.core.engine import ANY_SENDER, ModelFacts, ModelNames, StreamTimes, TextSender
from caravan_scheduler.core.errors import EngineError, GenerationError, NoShardError, TextTooLongError
from caravan_scheduler.core.generation import GenerationSpec, GenerationState
from caravan_scheduler.core.media import MediaPrompt
from caravan_scheduler.core.prefixes import CachedPrefix, PinRefusal, PrefixReport, ShardPrefixes
from caravan_scheduler.core.prompt_media import MediaTokens, media_tokens_of
from caravan_scheduler.core.recomputed import Recomputed
from caravan_scheduler.core.shards import ShardReport, ShardStanding, ShardState
from caravan_scheduler.core.tokens import Alternative, GeneratedToken, PromptToken
from caravan_scheduler.core.trace import NO_TRACE, GenerationTrace

BOS, EOS = 1, 2

MODEL = ModelFacts(
    name="scripted",
    fingerprint="f" * 16,
    vocabulary_size=1000,
    chat_template="",
    bos_text="<s>",
    eos_text="</s>",
    max_sequence_tokens=256,
    max_top_n_tokens=5,
    max_tokenize_bytes=10_000,
    total_cells=4096,
    adapters=("pirate",),
    embedding_size=8,
    max_embed_tokens=64,
)

# A model that can fill in the middle of a text.
FILL = FillTokens(prefix=990, suffix=991, middle=992, begin=BOS)
FILL_MODEL = replace(MODEL, fill=FILL)

# Cells of each picture and sound of a prompt.
MEDIA_CELLS = 4
MEDIA = MediaFacts(
    images=True,
    audio=True,
    atomic=False,
    max_cells=64,
    fingerprint=b"projector",
    audio_sample_rate=16_000,
    max_bytes=1 << 24,
)

CHAT_MODEL = replace(MODEL, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
"""A model whose template joins the contents of the messages."""
SEEING_MODEL = replace(CHAT_MODEL, media=MEDIA)
"""A model with that template that sees and hears."""


def word(
    piece: str | bytes,
    token_id: int = 10,
    *,
    finish: FinishReason | None = None,
    special: bool = False,
    logprob: float | None = None,
    alternatives: Sequence[Alternative] = (),
) -> GeneratedToken:
    """Return a token with the text ``piece``."""
    raw = piece.encode() if isinstance(piece, str) else piece
    return GeneratedToken(token_id, raw, special, logprob, tuple(alternatives), finish)


EOS_TOKEN = word("</s>", EOS, finish=FinishReason.EOS_TOKEN, special=True)


def ids_of(text: str) -> tuple[int, ...]:
    """Return the tokens of a text without control tokens, as a scripted engine's tokenizer has them."""
    return tuple(100 + ord(character) % 800 for character in text)


def length_vector(length: int, size: int = MODEL.embedding_size) -> list[float]:
    """Return the vector that a scripted engine has for a text of ``length`` tokens."""
    return [1.0 if index == length % size else 0.0 for index in range(size)]


@dataclass(frozen=True, slots=True)
class Pause:
    """A step of a script: wait until the engine's ``resume`` is set."""


# A list has tokens that are ready together.
Step = GeneratedToken | list[GeneratedToken] | Pause | EngineError
Script = Callable[[GenerationSpec], Sequence[Step]]


def letters(text: str, size: int = 3) -> list[Step]:
    """Return steps that end with ``text``, so many letters in each."""
    return [*(word(text[at : at + size]) for at in range(0, len(text), size)), EOS_TOKEN]


def count_up(spec: GenerationSpec) -> list[Step]:
    """Return the tokens " w1", " w2", … up to the requested length, with logprobs if they are requested."""
    last = spec.stopping.max_new_tokens
    tokens: list[Step] = []
    for number in range(1, last + 1):
        alternatives = [
            Alternative(20 + rank, f" a{rank}".encode(), False, -1.0 - rank)
            for rank in range(spec.sampling.top_n_tokens)
        ]
        tokens.append(
            word(
                f" w{number}",
                10 + number,
                finish=FinishReason.LENGTH if number == last else None,
                logprob=-0.5 if spec.sampling.logprobs else None,
                alternatives=alternatives,
            )
        )
    return tokens


def no_problem(_: Constraint) -> str | None:
    return None


def nothing_cached(_: GenerationSpec) -> int:
    return 0


def _without(steps: Sequence[Step], tokens: int) -> list[Step]:
    """Return ``steps`` after so many tokens."""
    left: list[Step] = []
    for step in steps:
        if isinstance(step, list):
            if rest := step[tokens:]:
                left.append(rest)
            tokens = max(0, tokens - len(step))
        elif not isinstance(step, GeneratedToken):
            left.append(step)
        elif tokens:
            tokens -= 1
        else:
            left.append(step)
    return left


class ScriptedStream:
    def __init__(self, engine: "ScriptedEngine", spec: GenerationSpec) -> None:
        self._engine = engine
        self._steps = engine.script(spec)
        if spec.continued is not None:
            self._steps = _without(self._steps, len(spec.continued.token_ids))
        self._submitted = time.monotonic()
        self._first_token: float | None = None
        self.spec = spec
        self.closed = False
        self.thought_ended = self.tools_called = False
        self.sent = 0

    @property
    def state(self) -> GenerationState:
        if self.closed:
            return GenerationState.ENDED
        return GenerationState.RUNNING if self.sent else self._engine.state_before_tokens

    @property
    def times(self) -> StreamTimes:
        return StreamTimes(self._submitted, self._submitted, self._first_token)

    @property
    def prompt_computed(self) -> int:
        return self._engine.prompt_computed

    @property
    def recomputed(self) -> Recomputed | None:
        return self._engine.recomputed

    @property
    def cached_tokens(self) -> int:
        assert self.sent or self.prompt_computed, "known from the start on"
        return self._engine.cached_tokens(self.spec)

    @property
    def prompt_logprobs(self) -> list[PromptToken]:
        assert self.sent, "complete from the first token on"
        if not self.spec.prompt_logprobs:
            return []
        alternatives = [
            Alternative(30 + rank, f" p{rank}".encode(), False, -2.0 - rank)
            for rank in range(self.spec.sampling.top_n_tokens)
        ]
        rest = [PromptToken(-0.25, tuple(alternatives)) for _ in self.spec.prompt[1:]]
        return [PromptToken(None, ()), *rest]

    @property
    def drafts(self) -> Sequence[DraftCount]:
        return self._engine.drafts

    @property
    def feedback(self) -> float | None:
        return float(self.sent) if self.spec.sampling.has_feedback else None

    async def __aiter__(self) -> AsyncIterator[Sequence[GeneratedToken]]:
        for step in self._steps:
            if isinstance(step, Pause):
                await self._engine.resume.wait()
                continue
            if isinstance(step, EngineError):
                raise step
            await asyncio.sleep(self._engine.step_s)
            assert not self.closed, "read after close"
            self._first_token = self._first_token or time.monotonic()
            tokens = step if isinstance(step, list) else [step]
            self.sent += len(tokens)
            yield tokens

    def end_thought(self) -> None:
        self.thought_ended = True

    def call_tools(self) -> None:
        self.tools_called = True

    def close(self) -> None:
        assert not self.closed, "closed twice"
        self.closed = True


@dataclass
class ScriptedEngine:
    """``streams`` are all streams that were submitted. The tokenizer makes one token of each character, after BOS."""

    script: Script = count_up
    cached_tokens: Callable[[GenerationSpec], int] = nothing_cached
    step_s: float = 0.0
    model: ModelFacts = MODEL
    joined: bool = True
    # Other models that are served beside this one.
    others: list["ScriptedEngine"] = field(default_factory=list)
    expected: Sequence[str] = ()
    healthy: bool = True
    ready: bool = True
    neighbour_url: str | None = None
    borrows: bool = False
    may_watch: bool = True
    streams: list[ScriptedStream] = field(default_factory=list)
    resume: asyncio.Event = field(default_factory=asyncio.Event)
    # Texts wait for it before they are tokenized. `texts_waiting` do so now.
    tokenizing: asyncio.Event | None = None
    # In bytes: the longest text that this engine's shard tokenizes, if it is less than the model's facts say.
    longest_text: int = 1 << 40
    text_senders: list[TextSender] = field(default_factory=list)
    texts_waiting: int = 0
    state_before_tokens: GenerationState = GenerationState.QUEUED
    # Texts that are control tokens, and their ids.
    controls: dict[str, int] = field(default_factory=dict)
    # What shards hold of ended sequences, by shard.
    prefixes: dict[str, ShardPrefixes] = field(default_factory=dict)
    # Tokens of prefixes, by key.
    contents: dict[bytes, tuple[int, ...]] = field(default_factory=dict)
    # Ids of pinned prefixes, the prompts that were pinned, and the most tokens of a prefix that is not refused.
    pinned: list[str] = field(default_factory=list)
    pinned_specs: list[GenerationSpec] = field(default_factory=list)
    most_pinned: int = 200
    reports: list[ShardReport] = field(default_factory=list)
    # Of the prompt of each stream, before its first token.
    prompt_computed: int = 0
    # Why the prompt of each stream is not cached, once it has started.
    recomputed: Recomputed | None = None
    # Returns what is wrong with a constraint, or None.
    problem: Callable[[Constraint], str | None] = no_problem
    # The draft tokens of each stream.
    drafts: Sequence[DraftCount] = ()

    @property
    def queries(self) -> "ScriptedEngine":
        return self

    @property
    def engines(self) -> list["ScriptedEngine"]:
        return [self, *self.others] if self.joined else list(self.others)

    @property
    def names(self) -> ModelNames:
        return ModelNames(tuple(self.expected), strict=bool(self.expected or self.others))

    def engine(self, name: str) -> "ScriptedEngine | None":
        return next((engine for engine in self.engines if name in ("", engine.model.name)), None)

    async def wait_for_model(self, name: str) -> None:
        """Return at once: a script has a model from the start, or never."""

    def submit(self, spec: GenerationSpec, trace: GenerationTrace = NO_TRACE) -> ScriptedStream:
        stream = ScriptedStream(self, spec)
        self.streams.append(stream)
        return stream

    async def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> TokenizedText:
        if not self.joined:
            raise NoShardError("none")
        if self.tokenizing is not None:
            self.texts_waiting += 1
            try:
                await self.tokenizing.wait()
            finally:
                self.texts_waiting -= 1
        if len(text.encode()) > min(self.longest_text, self.model.max_tokenize_bytes):
            raise TextTooLongError("too long")
        ids: list[int] = []
        pieces: list[bytes] = []
        specials: list[bool] = []
        controls = self.controls if parse_special else ()
        start = 0
        while start < len(text):
            control = next((control for control in controls if text.startswith(control, start)), None)
            piece = control or text[start]
            ids += ids_of(piece) if control is None else [self.controls[control]]
            pieces.append(piece.encode())
            specials.append(control is not None)
            start += len(piece)
        if add_special:
            ids, pieces, specials = [BOS, *ids], [b"<s>", *pieces], [True, *specials]
        return TokenizedText(tuple(ids), tuple(pieces), tuple(specials))

    async def tokenize_parts(
        self, parts: MediaPrompt, *, add_special: bool = True, parse_special: bool = True
    ) -> MediaTokens:
        """Return `MEDIA_CELLS` cells for each picture and sound, between the tokens of the texts."""
        assert self.model.media is not None, "it neither sees nor hears"
        assert isinstance(parts[0], str), "a text has the begin token"
        ids: list[int] = []
        pieces: list[bytes] = []
        specials: list[bool] = []
        spans: list[MediaSpan] = []
        for number, part in enumerate(parts):
            if isinstance(part, str):
                text = await self.tokenize(part, add_special=add_special and number == 0, parse_special=parse_special)
                ids += text.token_ids
                pieces += text.pieces
                specials += text.specials
            else:
                spans.append(MediaSpan(offset=len(ids), media_id=part.id, count=MEDIA_CELLS, positions=MEDIA_CELLS))
                ids += [0] * MEDIA_CELLS
                pieces += [b""] * MEDIA_CELLS
                specials += [True] * MEDIA_CELLS
        tokenized = TokenizedParts(tuple(ids), tuple(pieces), tuple(specials), tuple(spans))
        return media_tokens_of(tokenized, (part for part in parts if not isinstance(part, str)), self.model.media)

    async def tokenize_texts(
        self, texts: Sequence[str], *, add_special: bool = True, parse_special: bool = True
    ) -> list[tuple[int, ...]]:
        found = await asyncio.gather(
            *(self.tokenize(text, add_special=add_special, parse_special=parse_special) for text in texts)
        )
        return [tokenized.token_ids for tokenized in found]

    async def tokenize_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[int, ...]]:
        async def tokenize(pair: tuple[str, str]) -> tuple[int, ...]:
            first, second = await self.tokenize(pair[0]), await self.tokenize(pair[1])
            return first.token_ids + second.token_ids

        return await asyncio.gather(*map(tokenize, pairs))

    async def detokenize(self, token_ids: Sequence[int]) -> TokenizedText:
        special = {BOS: b"<s>", EOS: b"</s>"}
        pieces = [special.get(token_id) or chr((token_id - 100) % 800).encode() for token_id in token_ids]
        return TokenizedText(tuple(token_ids), tuple(pieces), tuple(token_id in special for token_id in token_ids))

    async def compile_constraint(self, constraint: Constraint) -> str | None:
        if not self.joined:
            raise NoShardError("none")
        return self.problem(constraint)

    async def embed(self, texts: Sequence[tuple[int, ...]], sender: TextSender = ANY_SENDER) -> list[tuple[float, ...]]:
        """Return the `length_vector` of each text, or one over its length from a model that ranks."""
        self.text_senders.append(sender)
        if not self.joined:
            raise NoShardError("none")
        if self.model.ranks:
            return [(1 / len(text),) for text in texts]
        return [tuple(length_vector(len(text), self.model.embedding_size)) for text in texts]

    @property
    def hands_over(self) -> bool:
        return not self.healthy or self.borrows

    def neighbour(self, name: str) -> str | None:
        return self.neighbour_url if name in ("", self.model.name) and self.hands_over else None

    def shards(self) -> list[ShardReport]:
        return self.reports

    @property
    def adapters(self) -> "ScriptedEngine":
        return self

    async def load(self, model: str, source: AdapterSource, *, replaces: bool) -> str:
        if problem := source_problem(source):
            return problem
        if source.name in self.model.loaded_adapters and not replaces:
            return f"lora_name must not be that of a loaded adapter, unless load_inplace is set. Given: {source.name!r}"
        self._set_loaded({**self.model.loaded_adapters, source.name: adapter_key(source, source.path)})
        return ""

    def unload(self, name: str) -> bool:
        loaded = dict(self.model.loaded_adapters)
        was_served = loaded.pop(name, None) is not None
        self._set_loaded(loaded)
        return was_served

    def _set_loaded(self, loaded: dict[str, str]) -> None:
        own = [name for name in self.model.adapters if name not in self.model.loaded_adapters]
        self.model = replace(self.model, adapters=(*own, *loaded), loaded_adapters=loaded)

    async def drain_shard(self, address: str) -> bool:
        standings = {report.address: report.standing.state for report in self.reports}
        if standings.get(address) is not ShardState.SERVING:
            return False
        draining = ShardStanding(state=ShardState.DRAINING, since_s=time.monotonic(), reason="the shard is ending")
        self.reports = [
            replace(report, standing=draining) if report.address == address else report for report in self.reports
        ]
        return True

    @property
    def prefix_cache(self) -> "ScriptedEngine":
        return self

    @property
    def timeline(self) -> "ScriptedEngine":
        return self

    def messages(self) -> AsyncGenerator[bytes, None] | None:
        return self._messages() if self.may_watch else None

    async def _messages(self) -> AsyncGenerator[bytes, None]:
        yield b'{"type":"gone","model":"scripted","at":1.0}'
        await asyncio.Event().wait()

    def cached_prefixes(self) -> list[ShardPrefixes]:
        return list(self.prefixes.values())

    async def flush_prefixes(self, shards: Collection[str]) -> list[ShardPrefixes]:
        found = [self.prefixes[name] for name in shards]
        empty = {name: ShardPrefixes(shard=name, cells=0, memory_bytes=0, disk_bytes=0, prefixes=()) for name in shards}
        self.prefixes |= empty
        return found

    def find_prefix(self, prefix_id: str) -> PrefixReport | None:
        places = [
            (shard, prefix)
            for shard, one in self.prefixes.items()
            for prefix in one.prefixes
            if one.id_of(prefix) == prefix_id
        ]
        return self._report(prefix_id, places[0][1], tuple(places)) if places else None

    def _report(
        self, prefix_id: str, prefix: CachedPrefix, places: tuple[tuple[str, CachedPrefix], ...]
    ) -> PrefixReport:
        return PrefixReport(
            prefix_id=prefix_id,
            model=self.model.name,
            tokens=prefix.tokens,
            tenant=prefix.tenant,
            adapter=prefix.adapter,
            pinned=prefix_id in self.pinned,
            places=places,
            token_ids=self.contents.get(prefix.key),
        )

    async def drop_prefix(self, prefix_id: str) -> PrefixReport | None:
        found = self.find_prefix(prefix_id)
        self.prefixes = {
            shard: replace(one, prefixes=tuple(prefix for prefix in one.prefixes if one.id_of(prefix) != prefix_id))
            for shard, one in self.prefixes.items()
        }
        return found

    def pins(self) -> list[PrefixReport]:
        return [report for prefix_id in self.pinned if (report := self.find_prefix(prefix_id)) is not None]

    async def pin_prefix(self, prefix_id: str) -> PrefixReport | PinRefusal | None:
        found = self.find_prefix(prefix_id)
        if found is None or found.tokens > self.most_pinned:
            return found and PinRefusal(limit_bytes=self.most_pinned, needed_bytes=found.tokens)
        self.pinned.append(prefix_id)
        return self.find_prefix(prefix_id)

    def unpin_prefix(self, prefix_id: str) -> PrefixReport | None:
        if prefix_id not in self.pinned:
            return None
        self.pinned.remove(prefix_id)
        return self.find_prefix(prefix_id)

    async def pin_prompt(self, spec: GenerationSpec) -> PrefixReport | PinRefusal:
        tokens, tenant = len(spec.prompt), spec.tenant.name
        if tokens > self.most_pinned:
            return PinRefusal(limit_bytes=self.most_pinned, needed_bytes=tokens)
        self.pinned_specs.append(spec)
        prefix = CachedPrefix(
            key=bytes(16), tokens=tokens, cells=tokens, tenant=tenant, adapter=spec.adapter, last_used_s=0.0
        )
        self.pinned.append("an-id")
        return self._report("an-id", prefix, ())

    @property
    def spec(self) -> GenerationSpec:
        """The spec of the last submission."""
        return self.streams[-1].spec

    @property
    def all_closed(self) -> bool:
        return all(stream.closed for stream in self.streams)


class FailingEmbedEngine(ScriptedEngine):
    """An engine that fails to embed texts."""

    async def embed(self, texts: Sequence[tuple[int, ...]], sender: TextSender = ANY_SENDER) -> list[tuple[float, ...]]:
        raise GenerationError(f"no room for {len(texts)}")


TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}</tool_call>{% endfor %}</s>{% endfor %}"
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}[assistant]"
)
WORD_MODEL = replace(CHAT_MODEL, chat_template=TEMPLATE, max_sequence_tokens=512)
FIRST_WORD = 900


@dataclass
class WordEngine(ScriptedEngine):
    """An engine that generates ``words``, one token each, and the end token. The tokenizer splits text by character."""

    model: ModelFacts = WORD_MODEL
    words: Sequence[str] = ("Hello", " you")

    def __post_init__(self) -> None:
        self.controls = {"</s>": EOS}
        tokens = [word(piece, FIRST_WORD + at) for at, piece in enumerate(self.words)]
        self.script = lambda _: [*tokens, EOS_TOKEN]

    async def detokenize(self, token_ids: Sequence[int]) -> TokenizedText:
        known = {FIRST_WORD + at: piece.encode() for at, piece in enumerate(self.words)} | {BOS: b"<s>", EOS: b"</s>"}
        pieces = [known.get(token_id) or chr(max(0, token_id - 100)).encode() for token_id in token_ids]
        return TokenizedText(tuple(token_ids), tuple(pieces), tuple(token_id in (BOS, EOS) for token_id in token_ids))


def prompt_text(engine: ScriptedEngine) -> str:
    """Return the last prompt; words that were generated as their ids in angle brackets."""
    return "".join(map(_shown, engine.spec.prompt[1:]))


def _shown(token_id: int) -> str:
    if token_id == EOS:
        return "</s>"
    return f"<{token_id}>" if token_id >= FIRST_WORD else chr(token_id - 100)
