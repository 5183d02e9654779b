"""A complete Caravan in one process: shards with the toy model, gRPC over Unix sockets, the engine, and HTTP."""

import asyncio
import contextlib
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from aiohttp import ClientSession

from caravan_dialects.api.limits import Limits
from caravan_models.contents import SeenFile, SeenFiles
from caravan_proto.messages.limits import KvLayout
from caravan_router.accounting.accounts import Accounts, AccountsSettings
from caravan_router.engine.batcher import Batcher
from caravan_router.engine.discovery import Address, AddressFile, ShardSource
from caravan_router.engine.fleet import Fleet
from caravan_router.engine.link_config import LinkConfig
from caravan_router.http.app import OPEN_TO_ALL, Access, build_app
from caravan_router.http.server.listener import Listen, listening
from caravan_router.http.server.state import TRACING
from caravan_router.metrics.recorder import Metrics
from caravan_scheduler import invariants
from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.core.shards import ShardReport, ShardState
from caravan_scheduler.core.trace import Tracing
from caravan_scheduler.shard.account import ShardAccount
from caravan_shard.backends.base import DecodeOutcome, TokenBatch
from caravan_shard.backends.given_embeddings import EmbeddingsEncoder
from caravan_shard.backends.toy.backend import EMBEDDING_SIZE, DecodeHook, ToyBackend
from caravan_shard.backends.toy.media import ToyEncoder
from caravan_shard.backends.toy.model import TOY_FACTS, ToyVocabulary
from caravan_shard.config import ShardConfig
from caravan_shard.media import MediaStore
from caravan_shard.sequences.run_files import RunFiles
from caravan_shard.sequences.runs import RunStore
from caravan_shard.service.server import ShardServer
from caravan_testing.http_server import sample_of
from caravan_testing.metrics_text import total
from caravan_testing.shard_builders import ToyDraftModel
from caravan_testing.toy_oracle import expected_output
from caravan_testing.waiting import DEADLINE_S, eventually, in_time

# Replaced where the tests of text run as tests of pictures.
default_encoder: Callable[[], ToyEncoder] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """The configuration of all shards. ``hook`` runs before each step of any shard, on its worker thread.

    ``wrong_every``: shards have a draft model that is wrong in every so many of its steps, never if 0; None for none.
    ``listed``: the router has the addresses from a file (see `Cluster.list_shards`), not from its flags.
    ``run_files``: shards also keep saved runs in files, and find them when they are started again.
    ``numerics``: a fingerprint of how each shard computes; without, all compute alike. ``make_encoder``: how each gets
    its encoder; None for shards that read text only.
    """

    shards: int = 1
    listed: bool = False
    run_files: bool = False
    numerics: tuple[str, ...] = ()
    cells: int = 4096
    max_sequences: int = 8
    max_batch_tokens: int = 512
    layout: KvLayout = KvLayout.UNIFIED
    whole_only: bool = False
    step_s: float = 0.0
    token_s: float = 0.0
    other_layouts: tuple[KvLayout, ...] = ()
    saved_bytes: int = 1 << 30
    max_prompt_logprob_tokens: int = 64
    embedding_size: int = 0
    adapters: tuple[str, ...] = ()
    lora_dir: str = ""
    max_loras: int = 8
    chat_template: str | None = None
    hook: DecodeHook | None = None
    wrong_every: int | None = None
    drain_timeout_s: float = 0.5
    make_encoder: Callable[[], ToyEncoder | EmbeddingsEncoder] | None = None
    expected: tuple[str, ...] = ()
    vllm_metrics: bool = False
    tracing: Tracing | None = None
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    limits: Limits = field(default_factory=Limits)
    access: Access = OPEN_TO_ALL
    link: LinkConfig = field(
        default_factory=lambda: LinkConfig(router_id="test", heartbeat_s=0.2, silence_s=20.0, address_refresh_s=0.02)
    )


VOCABULARY = ToyVocabulary()


class Cluster:
    """Shards by address, and the fleet that leases them."""

    def __init__(self, config: ClusterConfig, folder: Path) -> None:
        self.config = config
        self._folder = folder
        self.cache_dir = folder / "cache"
        self.servers: dict[str, ShardServer] = {}
        self.backends: dict[str, ToyBackend] = {}
        self.metrics = Metrics(vllm_names=config.vllm_metrics)
        self.addresses = [f"unix:{folder}/{number}.sock" for number in range(config.shards)]
        self._list = folder / "shards"
        fixed = (Address(address) for address in self.addresses)
        sources: list[ShardSource] = [AddressFile(str(self._list))] if config.listed else [*fixed]
        self.fleet = Fleet(sources, config.scheduler, config.link, self.metrics.of, config.expected)
        self.accounts = Accounts(AccountsSettings())
        self.url = ""
        self.engine_task: asyncio.Task[None] | None = None

    @property
    def engine(self) -> Batcher:
        """The engine of the default model, of which a shard must have joined."""
        engine = self.fleet.engine("")
        assert engine is not None, "no shard has joined yet"
        return engine

    @property
    def every_engine(self) -> list[Batcher]:
        """The engines of all models, also those of one name."""
        return [*self.fleet._batchers]

    async def end_router(self) -> None:
        """End the router's engine, as at the end of its process. The shards stay."""
        assert self.engine_task is not None
        self.engine_task.cancel()
        await asyncio.wait({self.engine_task})

    def list_shards(self, addresses: Iterable[str]) -> None:
        """Write the file of addresses."""
        new = self._list.with_suffix(".new")
        new.write_text("".join(f"{address}\n" for address in addresses))
        new.replace(self._list)

    def delete_list(self) -> None:
        self._list.unlink()

    def add_address(self) -> str:
        """Return an address at which no shard was started yet."""
        self.addresses.append(f"unix:{self._folder}/{len(self.addresses)}.sock")
        return self.addresses[-1]

    def report(self, address: str) -> ShardReport | None:
        """Return what the engine knows of the shard at ``address``; None if it does not know the address."""
        return next((report for report in self.fleet.shards() if report.address == address), None)

    def state(self, address: str) -> ShardState | None:
        """Return the state of the shard at ``address``; None if the engine does not know the address."""
        report = self.report(address)
        return None if report is None else report.standing.state

    async def start_shard(
        self,
        address: str,
        model: str = "toy",
        file: str = "toy-1",
        *,
        state_fingerprint: str | None = None,
        vocabulary_fingerprint: str = TOY_FACTS.vocabulary_fingerprint,
        only_embeds: bool = False,
        weights: Path | None = None,
    ) -> None:
        """Start a shard with a ``model`` of this name, which was read from a ``file`` of this fingerprint.

        ``state_fingerprint``: set if its saved runs have another form. ``vocabulary_fingerprint``: set if it
        says that it has another vocabulary. ``weights``: a file that stands for the model's, which the shard reads
        before it uses what was saved in the cluster's ``cache_dir``.
        """
        config = self.config
        if only_embeds:
            config = replace(config, cells=0, max_sequences=0, max_batch_tokens=0, embedding_size=EMBEDDING_SIZE)
        make_encoder = config.make_encoder or default_encoder
        self.backends[address] = ToyBackend(
            cells=config.cells,
            max_sequences=config.max_sequences,
            max_batch_tokens=config.max_batch_tokens,
            layout=config.layout,
            whole_only=config.whole_only,
            other_layouts=config.other_layouts,
            max_prompt_logprob_tokens=config.max_prompt_logprob_tokens,
            embedding_size=config.embedding_size,
            adapters=config.adapters,
            step_s=config.step_s,
            token_s=config.token_s,
            hook=config.hook,
            media=None if make_encoder is None else make_encoder(),
        )
        if config.chat_template is not None:
            backend = self.backends[address]
            backend.facts = replace(backend.facts, chat_template=config.chat_template)
        backend = self.backends[address]
        backend.facts = replace(
            backend.facts, name=model, fingerprint=file, vocabulary_fingerprint=vocabulary_fingerprint
        )
        backend.contents.sha256 = file
        if config.wrong_every is not None:
            backend.draft_model = ToyDraftModel(wrong_every=config.wrong_every, max_sequences=config.max_sequences)
            backend.facts = replace(backend.facts, draft_model="toy-draft")
        if config.numerics:
            number = self.addresses.index(address)
            backend.numerics = replace(backend.numerics, fingerprint=config.numerics[number])
        if state_fingerprint is not None:
            backend.contents.state_fingerprint = state_fingerprint
        if weights is not None:
            backend.stand_for(SeenFiles(model=(SeenFile.at(weights),)))
        self.servers[address] = ShardServer(
            ShardConfig(
                backend="fake",
                address=address,
                cache_dir="" if weights is None else str(self.cache_dir),
                drain_timeout_s=config.drain_timeout_s,
                lora_dir=config.lora_dir,
                max_loras=config.max_loras,
            ),
            lambda: self.backends[address],
        )
        files = RunFiles(self._folder / "runs", "ab" * 32) if config.run_files else None
        disk_bytes = config.saved_bytes if config.run_files else 0
        if weights is None:
            self.servers[address]._shard.worker._make_runs = lambda _: RunStore(config.saved_bytes, files, disk_bytes)
        await self.servers[address].start()

    async def stop_shard(self, address: str) -> None:
        """Stop a shard, and wait until the router has lost it, so that what follows happens to a router that knows."""
        await self.servers.pop(address).stop()
        held = (ShardState.SERVING, ShardState.DRAINING)
        await eventually(lambda: self.state(address) not in held, f"{address} is lost")

    async def drain_shard(self, address: str) -> None:
        """Drain a shard by the HTTP route, and end it when it has drained."""
        server = self.servers[address]
        async with ClientSession() as session:
            name = address.replace("/", "%2F")
            async with session.post(f"{self.url}/admin/shards/{name}/drain") as response:
                assert response.status == 200, await response.text()
        assert server.drain_asked.is_set()
        async with in_time(f"{address} has drained"):
            await server.drain()
        await self.stop_shard(address)

    def embeddings(self, address: str) -> MediaStore:
        """Return the embeddings of media that a shard has."""
        return self.servers[address]._shard.engine.media

    def saved_runs(self, address: str) -> set[bytes]:
        """Return the keys of the runs that the shard has saved."""
        return {run.key for run, _ in self.servers[address]._shard.engine.runs.list_runs()}

    def queued_commands(self, address: str) -> int:
        """Return the number of commands that the shard has received and not started."""
        return len(self.servers[address]._shard.worker._queue)

    async def metric(self, name: str) -> float:
        """Return the value of a metric; ``name`` includes its labels."""
        return await sample_of(self.metrics, name)

    async def queue_size(self) -> float:
        """Return how many requests wait."""
        return total((await self.metrics.render()).decode(), "tgi_queue_size")

    async def wait_until_up(self, shards: int) -> None:
        def count() -> int:
            return sum(len(engine.scheduler.shards) for engine in self.every_engine)

        await eventually(lambda: count() == shards, f"{shards} shards up")

    async def wait_until_all_have(self, tokens: int, sequences: int) -> None:
        """Wait until ``sequences`` generate, each with more than ``tokens`` tokens. None may end
        before the last one begins.
        """
        await eventually(
            lambda: sum(len(s.output) > tokens for s in self.engine.scheduler.sequences.values()) == sequences,
            f"each of {sequences} sequences has more than {tokens} tokens",
        )

    async def wait_until_at_rest(self) -> None:
        """Wait until no request is left, and check that router and shards hold nothing but parked prefixes."""
        schedulers = [engine.scheduler for engine in self.every_engine]
        await eventually(lambda: not any(scheduler.sequences for scheduler in schedulers), "every request ended")

        def ledgers() -> dict[str, ShardAccount]:
            return {name: shard for scheduler in schedulers for name, shard in scheduler.shards.items()}

        # The scheduler hears of a shard just after its link is SERVING.
        await eventually(lambda: self.servers.keys() <= ledgers().keys(), "the scheduler has every shard")
        await eventually(
            lambda: all(
                not s.stays.residents and not s.header.is_needed and not s.commands.in_flight
                for s in ledgers().values()
            ),
            "every sequence released",
        )
        for scheduler in schedulers:
            invariants.check(scheduler)
        for address, backend in self.backends.items():
            if address in self.servers:
                state = ledgers()[address]
                held = {key: backend.length(key) for key in range(self.config.max_sequences) if backend.length(key)}
                parked = {key: state.cells.tree.length(key) for key in state.stays.parked}
                assert held == parked, f"{address} holds {held}, parked are {parked}"
                assert set(state.runs.keys) == self.saved_runs(address), f"{address} has not the runs of the ledger"


@contextlib.asynccontextmanager
async def cluster(config: ClusterConfig | None = None) -> AsyncIterator[Cluster]:
    """Start everything and wait until all shards are up; end everything at the end of the block."""
    config = config or ClusterConfig()
    with tempfile.TemporaryDirectory() as folder:
        running = Cluster(config, Path(folder))
        for address in running.addresses:
            await running.start_shard(address)
        if config.listed:
            running.list_shards(running.addresses)
        app = build_app(running.fleet, config.limits, running.metrics, access=config.access, accounts=running.accounts)
        running.fleet.timeline.tell_of_engines(running.accounts.follow)
        running.engine_task = engine = asyncio.create_task(running.fleet.run())
        if config.tracing is not None:
            app[TRACING] = config.tracing
        try:
            async with listening(app, config.limits, Listen(drain_s=0.1)) as port:
                running.url = port.url
                await running.wait_until_up(config.shards)
                yield running
        finally:
            engine.cancel()
            await asyncio.wait({engine})
            for address in list(running.servers):
                await running.stop_shard(address)
            if not engine.cancelled():
                # It says more than what a client saw.
                engine.result()


def expected_text(prompt: str, max_new_tokens: int, adapter: str = "") -> str:
    """Return the toy model's greedy output for ``prompt`` as text. ``adapter``: its key."""
    prompt_tokens = VOCABULARY.tokenize(prompt, add_special=True, parse_special=True)
    tokens = expected_output(prompt_tokens, max_new_tokens, adapter=adapter)
    pieces = [VOCABULARY.piece(token) for token in tokens]
    return b"".join(piece.data for piece in pieces if not piece.special).decode(errors="replace")


def body(prompt: str, max_new_tokens: int) -> dict[str, object]:
    """Return the body of a request to /generate."""
    return {"inputs": prompt, "parameters": {"max_new_tokens": max_new_tokens}}


async def generate(session: ClientSession, url: str, body: dict[str, object]) -> dict[str, object]:
    """POST to /generate and return the body of the reply, whose status must be 200."""
    async with session.post(f"{url}/generate", json=body) as response:
        answer: dict[str, object] = await response.json()
        assert response.status == 200, answer
        return answer


class StepLog:
    """``steps``: the tokens of each step, in the order in which the steps began."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []
        self._open = threading.Event()
        self._open.set()
        self._held = threading.Event()

    def __call__(self, batch: TokenBatch) -> DecodeOutcome | None:
        """Record a step. Runs on the worker's thread."""
        self.steps.append(batch.tokens.tolist())
        if not self._open.is_set():
            self._held.set()
            self._open.wait(DEADLINE_S)  # a test that fails must not hold the thread for ever
            self._held.clear()
        return None

    @property
    def computed_tokens(self) -> int:
        """Number of tokens of all steps."""
        return sum(map(len, self.steps))

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Run the block during a step: the next one, which does not end before the block."""
        self._open.clear()
        try:
            await eventually(self._held.is_set, "a step began")
            yield
        finally:
            self._open.set()

    async def next_step(self) -> None:
        """Let the step that is held end, and hold the next one."""
        begun = len(self.steps)
        self._open.set()
        self._open.clear()
        await eventually(lambda: len(self.steps) > begun and self._held.is_set(), "the next step began")
