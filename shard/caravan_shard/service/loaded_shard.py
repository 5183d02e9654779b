"""A loaded shard without a port: what answers the calls, whether gRPC brings them or a caller in this process."""

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import caravan_proto
from caravan_proto.messages.limits import Limits
from caravan_proto.messages.model import Info, ModelFile
from caravan_proto.tls import MutualTls
from caravan_shard.backends.base import Backend, Vocabulary
from caravan_shard.checks.sampling import MAX_TOP_N_TOKENS
from caravan_shard.config import ShardConfig
from caravan_shard.constraints.compiler import ConstraintCompiler
from caravan_shard.constraints.tokenizer import ConstraintTokenizer
from caravan_shard.engine.engine import Engine
from caravan_shard.engine.worker import Worker
from caravan_shard.media import MediaStore
from caravan_shard.sampling.processors import ProcessorRegistry
from caravan_shard.sequences.runs import CLOSE_S
from caravan_shard.service.adapters import AdapterService
from caravan_shard.service.calls import CallHandler
from caravan_shard.service.contents import ContentsReader
from caravan_shard.service.lease import ShardLease
from caravan_shard.service.loading import backend_loader, make_run_store
from caravan_shard.service.media import MediaService
from caravan_shard.service.model_calls import ModelCalls
from caravan_shard.service.phase import Phase, PhaseSignal
from caravan_shard.service.run_exchange import RunExchange, run_fingerprint
from caravan_shard.service.text import TextService

# How long the end of the worker is waited for: the step and the texts that run, beside or before the writing of runs.
STOP_S = CLOSE_S + 1.0


class LoadedShard:
    """Create it, `start` it and finally `stop` it, all on one event loop. ``calls`` answers calls."""

    # Set by `start`.
    engine: Engine
    lease: ShardLease
    calls: CallHandler

    def __init__(
        self,
        config: ShardConfig,
        load: Callable[[], Backend] | None = None,
        ask_drain: Callable[[], None] | None = None,
    ) -> None:
        """``load`` makes the backend on the worker's thread; by default the one that the flags name.

        ``ask_drain``: see `CallHandler`.
        """
        self._config = config
        self.worker = Worker(
            load or backend_loader(config, self._make_tokenizer),
            config.sampling_threads,
            lambda backend: make_run_store(config, backend),
            MediaStore(config.media_cache_bytes),
        )
        self.phase = PhaseSignal()
        # Functions of the program in whose process the shard is.
        self.processors = ProcessorRegistry()
        self._ask_drain = ask_drain
        self._tokenizer: Future[ConstraintTokenizer] | None = None
        self._model_calls: ModelCalls | None = None
        # Releases what `start` acquired apart from the worker, the last first.
        self._acquired = contextlib.AsyncExitStack()

    async def start(self, tls: MutualTls | None = None) -> None:
        """Load the model. Raises StartupError. ``tls``: for fetching saved runs from other shards on TCP.

        If it fails or is cancelled, it ends what it began. Loading cannot be interrupted: its thread ends afterwards.
        """
        try:
            await self._start(tls)
        except BaseException:
            await self.worker.stop(0.0)
            await self.close()
            raise

    async def _start(self, tls: MutualTls | None) -> None:
        self.engine = await self.worker.start()
        backend = self.engine.backend
        model_calls = self._model_calls = ModelCalls(backend.vocabulary.users)
        most_bytes = self._config.max_tokenize_bytes
        text = TextService(backend.vocabulary, backend.facts.vocabulary_size, most_bytes, model_calls)
        self._acquired.callback(text.close)
        media = MediaService(backend.media, self.engine.media, text, model_calls)
        self._acquired.callback(media.close)
        compiler = None
        if backend.capacity.generates:
            # Made before anybody waits for the shard, since this holds the GIL for up to a second.
            making = self._tokenizer or self._make_tokenizer(backend.vocabulary, backend.facts)
            compiler = ConstraintCompiler(await asyncio.wrap_future(making))
            self._acquired.push_async_callback(compiler.close)
        exchange = RunExchange(self.worker, self.engine.runs, lambda: run_fingerprint(backend), tls, model_calls)
        self._acquired.callback(exchange.close)
        reader = ContentsReader(self._config, self.worker, self.engine)
        self._acquired.callback(reader.end)
        self.lease = ShardLease(self.worker.release_all)
        adapters = AdapterService(self._config, self.worker, self.lease, model_calls)
        self._acquired.callback(adapters.close)
        self.calls = CallHandler(
            info=self._make_info(self.engine),
            worker=self.worker,
            engine=self.engine,
            lease_of_shard=self.lease,
            phase=self.phase,
            text=text,
            media=media,
            compiler=compiler,
            exchange=exchange,
            adapters=adapters,
            model_calls=model_calls,
            processors=self.processors,
            ask_drain=self._ask_drain,
        )
        reader.start()

    def _make_tokenizer(self, vocabulary: Vocabulary, facts: ModelFile) -> Future[ConstraintTokenizer]:
        def make() -> ConstraintTokenizer:
            with vocabulary.users.using() as may_use:
                if not may_use:
                    # Loading has failed or was cancelled, and nobody waits for the tokenizer.
                    raise RuntimeError("the model is closed")
                return ConstraintTokenizer.of(vocabulary, facts)

        pool = ThreadPoolExecutor(1, "vocabulary")
        self._tokenizer = pool.submit(make)
        pool.shutdown(wait=False)
        return self._tokenizer

    def _make_info(self, engine: Engine) -> Callable[[], Info]:
        incarnation = secrets.token_hex(8)

        def info() -> Info:
            # The layout may change.
            capacity = engine.backend.capacity
            limits = Limits(
                layouts=capacity.layouts,
                max_sequences=capacity.max_sequences,
                max_batch_tokens=capacity.max_batch_tokens,
                max_top_n_tokens=MAX_TOP_N_TOKENS,
                max_tokenize_bytes=self._config.max_tokenize_bytes,
                max_prompt_logprob_tokens=capacity.max_prompt_logprob_tokens,
                max_draft_tokens=capacity.max_draft_tokens,
                embedding_size=capacity.embedding_size,
                max_embed_tokens=capacity.max_embed_tokens,
                embed_tokens_at_once=capacity.joint_embed.tokens * capacity.joint_embed.lanes,
                max_adapters=self._config.max_loras if self._config.lora_dir and capacity.generates else 0,
                ranks=capacity.ranks,
                saved_capacity=engine.runs.capacity,
                run_fingerprint=run_fingerprint(engine.backend),
            )
            return Info(
                shard_id=self._config.shard_id,
                incarnation=incarnation,
                model=replace(engine.backend.facts, sha256=engine.backend.contents.sha256),
                limits=limits,
                version=caravan_proto.__version__,
                numerics=engine.backend.numerics,
                epoch=self.lease.epoch,
                leased=self.lease.is_held,
                holder_url=self.lease.holder_url,
            )

        return info

    async def failed(self) -> None:
        """Wait until the worker fails, and raise its exception."""
        await asyncio.shield(self.worker.ended)

    async def stop(self) -> None:
        """End the worker's thread and free the model, then end everything that answered calls."""
        self.phase.advance(Phase.ENDED)
        await self.stop_worker()
        await self.close()

    async def stop_worker(self) -> None:
        """Refuse all calls, wait for those that use the model, and free it. Waits at most `STOP_S`.

        What takes longer, such as a large picture, keeps the model until it ends; see `has_freed_model`.
        """
        if self._model_calls is not None:
            self._model_calls.refuse()
        await self.worker.stop(STOP_S)

    @property
    def has_freed_model(self) -> bool:
        """Whether the model is gone, or was never loaded, so that nothing uses it."""
        return self.worker.ended.done()

    async def close(self) -> None:
        """End what answers calls, once none comes any more."""
        await self._acquired.aclose()
