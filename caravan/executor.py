"""A model whose conversations are stepped by hand, on the shard's backend."""

import itertools
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import numpy as np

from caravan.conversation import Conversation, Inference
from caravan.errors import ClosedError, GenerationError, ModelError, RequestError, StateError, WrongThreadError
from caravan.executor_cells import ExecutorCells
from caravan.executor_media import ExecutorMedia
from caravan.lowlevel import load_backend, make_sampler
from caravan.options import SERVED_OPTIONS, ExecutorOptions, split_options
from caravan.processes import OpeningProcess
from caravan.prompts import check_text
from caravan.python_names import python_names
from caravan.reprs import model_repr
from caravan.saved_state import NO_BYTES, SavedBatch, SavedConversation, decode, encode, find_shared, slices_of
from caravan.twins import Closing
from caravan.unloading import Unloading
from caravan_models.contents import ChangedFileError, Contents, SeenFiles
from caravan_proto.flags import from_values
from caravan_proto.host_memory import available_memory
from caravan_proto.messages.commands import PrefixCopy
from caravan_proto.messages.limits import Saving
from caravan_scheduler.core.prompt_media import is_cell
from caravan_shard.arrays import Floats, State
from caravan_shard.backends.base import Backend, DecodeOutcome, TokenBatch
from caravan_shard.config import ShardConfig
from caravan_shard.engine.step import single_tokens
from caravan_shard.service.loading import room_for_runs

if TYPE_CHECKING:
    from caravan.chat_prompts import ChatPrompts


_ANY_SIZE = 1 << 62


class BackgroundContents:
    """Begins to read the files of ``backend``; nothing that was saved may be used before that is done."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._ended = Event()
        self._found: Future[Contents] = Future()
        files = backend.contents.files
        if files is None:
            encoder = backend.media
            projector = "" if encoder is None else encoder.facts.fingerprint.hex()
            self._found.set_result(Contents(model=backend.contents.sha256, projector=projector))
        else:
            Thread(target=self._read, args=(files,), name="contents", daemon=True).start()

    def known(self) -> Contents:
        """Wait until the files are read; return what is in them. Raises StateError if they have changed."""
        contents = self._found.result()
        if not self._backend.contents.sha256:
            self._backend.contents.know(contents)
        return contents

    def end(self) -> None:
        """Let the thread end soon."""
        self._ended.set()

    def _read(self, files: SeenFiles) -> None:
        try:
            contents = files.read(lambda: not self._ended.is_set())
        except (ChangedFileError, OSError) as error:
            self._found.set_exception(StateError(f"conversations cannot be saved or restored: {error}"))
            return
        if contents is not None:
            self._found.set_result(contents)


class _Part(NamedTuple):
    """The share of a conversation in a step: its next ``tokens``, of which the last ``outputs`` get logits."""

    conversation: Conversation
    tokens: Sequence[int]
    outputs: int


class Executor(Closing):
    """A GGUF model in this process, whose conversations wait until `infer` is called.

    Only the thread that makes it may use it: see `AsyncExecutor` for a model with its own thread.
    Use it as a context manager, or `close` it. There may be more conversations than sequences: those that hold no cells
    cost memory for their tokens and logits alone.
    """

    def __init__(self, model: str | Path, **options: Unpack[ExecutorOptions]) -> None:
        """Load ``model``, a file or a name as in `LLM`.

        By default all sequences share one pool of cells (``kv_layout="unified"``), and `infer` names the conversations
        that have no room. With ``unload_idle`` others are unloaded instead, that whose last step is longest ago first.
        Their cells wait in host memory, at most ``cache_ram`` MiB, and come back when they are prompted.

        Raises ModelError, and TypeError or ValueError if an option is wrong.
        """
        if wrong := sorted(SERVED_OPTIONS.intersection(options)):
            raise TypeError(f"an executor has no engine with the options: {', '.join(wrong)}")
        defaults: dict[str, Any] = {"kv_layout": "auto" if options.get("exact") else "unified", "unload_idle": False}
        given = defaults | options
        unload_idle = given.pop("unload_idle")
        of_model, _ = split_options(model, given)
        self._model, self._options = str(model), options
        self._thread, self._process = threading.get_ident(), OpeningProcess()
        with python_names():
            config = from_values(ShardConfig, of_model)
        self.backend: Backend = load_backend(config)
        with ExitStack() as opened:
            opened.callback(self.backend.close)
            if not self.backend.capacity.generates:
                raise ModelError(
                    f"{self.backend.facts.name} only embeds texts: open it with LLM, and call embed or score"
                )
            self._contents = BackgroundContents(self.backend)
            opened.callback(self._contents.end)
            self.media = ExecutorMedia(self.backend)
            # One thread: a conversation samples alone.
            self.sampler = make_sampler(self.backend)
            room = room_for_runs(config, available_memory())
            unloading = Unloading(self.backend, self.media, room) if unload_idle else None
            self.cells = ExecutorCells(self.backend, self.media, unloading)
            self._closing = opened.pop_all()
        self._max_tokenize_bytes = config.max_tokenize_bytes
        self._chat_prompts: ChatPrompts | None = None
        self._close = weakref.finalize(self, self._process.call, self._closing.close)
        # In the order in which they were made.
        self._conversations: dict[Conversation, None] = {}
        # How many ended since media were last forgotten.
        self._ended = 0

    @classmethod
    def open(cls, path: str | Path, model: str | Path | None = None, **options: Unpack[ExecutorOptions]) -> "Executor":
        """Open a model with the conversations of a file that `save` wrote, in their order.

        ``model``: by default the file that the executor had. Raises StateError, ModelError, OSError.
        """
        batch = decode(Path(path).read_bytes())
        executor = cls(batch.model if model is None else model, **options)
        try:
            executor._load_all(batch)
        except BaseException:
            executor.close()
            raise
        return executor

    def close(self) -> None:
        """Close all conversations, and free the model. Closing it again, or in a forked child, does nothing."""
        if self._close.alive and self._process.is_this:
            self.check()
            for conversation in self.conversations:
                conversation.close()
            self._close()

    def __repr__(self) -> str:
        return model_repr("Executor", self._model, self._options, closed=not self._close.alive)

    @property
    def conversations(self) -> tuple[Conversation, ...]:
        """All conversations that are not closed, in the order in which they were made."""
        return tuple(self._conversations)

    @property
    def vocabulary_size(self) -> int:
        """Number of tokens of the vocabulary, the length of a row of logits."""
        return self.backend.facts.vocabulary_size

    def tokenize(self, text: str, *, add_special: bool = True) -> list[int]:
        """Return the token ids of ``text``, with what the model puts around a prompt if ``add_special``."""
        self.check()
        check_text(text)
        return self.backend.vocabulary.tokenize(text, add_special=add_special, parse_special=True)

    def create(self) -> Conversation:
        """Return a new conversation, without tokens."""
        self.check()
        conversation = Conversation(self)
        self._conversations[conversation] = None
        self.cells.use([conversation])
        return conversation

    def infer(self) -> Inference[Conversation]:
        """Run one step over the conversations that wait, at most ``batch_size`` tokens.

        The oldest is the first, or with ``unload_idle`` the one whose last step is longest ago.
        Raises GenerationError if the step fails for another reason than room; every conversation is as it was then.
        """
        self.check()
        put_off, unloaded = list[Conversation](), list[Conversation]()
        while True:
            computed, did = self._step(put_off)
            if computed and self.cells.unloading is not None:
                # Those that starve are among the first in the next step.
                return Inference(did.done, did.waiting + did.starved, ())
            if computed or not did.starved:
                return did
            if did.waiting:
                # They had no place in a step with those that have no room.
                put_off = list(did.starved)
            elif (last := self.cells.make_way()) is not None:
                unloaded.append(last)
                put_off = unloaded
            else:
                return did

    def _step(self, put_off: Sequence[Conversation]) -> tuple[bool, Inference[Conversation]]:
        """Run one step without those that are ``put_off``; say whether anything was computed."""
        parts, starved, others = self._plan(put_off)
        logits, dropped = None, list[_Part]()
        while parts and (logits := self._compute(parts)) is None:
            if self.cells.give_way():
                continue
            # Without the youngest one, the others may fit; without one that does not fit alone, the rest may.
            last = parts.pop()
            if parts:
                dropped.insert(0, last)
            else:
                starved.append(last.conversation)
                parts, dropped = dropped, []
        starved += [part.conversation for part in dropped]
        if logits is None:
            return False, Inference((), tuple(others), tuple(starved))
        row = 0
        for part in sorted(parts, key=_sequence_id):
            part.conversation.advance(len(part.tokens), logits[row : row + part.outputs])
            row += part.outputs
            if len(part.tokens) > 1 and not part.conversation.waiting:
                self.cells.note_cut_place(part.conversation)
        computed = [part.conversation for part in parts]
        self.cells.use(computed)
        return True, Inference(
            tuple(conversation for conversation in computed if not conversation.waiting),
            tuple(conversation for conversation in (*computed, *others) if conversation.waiting),
            tuple(starved),
        )

    def _plan(self, put_off: Sequence[Conversation]) -> tuple[list[_Part], list[Conversation], list[Conversation]]:
        """Return the parts of the next step, the conversations without a sequence, and those that have to wait."""
        capacity, unloading = self.backend.capacity, self.cells.unloading
        room, more_outputs = capacity.max_batch_tokens, capacity.max_prompt_logprob_tokens
        parts, starved, others = list[_Part](), list[Conversation](), list[Conversation]()
        new = 0
        for conversation in self.conversations if unloading is None else unloading.by_use:
            if not conversation.waiting:
                continue
            if conversation in put_off or (
                conversation.sequence_id is None and not self.cells.find_place(conversation, new)
            ):
                starved.append(conversation)
                continue
            tokens = conversation.waiting
            silent = max(0, conversation.first_output - conversation.held)
            count = self.media.chunk(tokens, min(len(tokens), room, silent + 1 + more_outputs), room)
            if count == 0:
                others.append(conversation)
                continue
            new += conversation.sequence_id is None
            outputs = max(0, count - silent)
            parts.append(_Part(conversation, tokens[:count], outputs))
            room -= count
            more_outputs -= max(0, outputs - 1)
        return parts, starved, others

    def _compute(self, parts: Sequence[_Part]) -> Floats | None:
        """Compute ``parts`` in one step; return the logits [outputs, vocabulary], or None if there is no room."""
        for part in parts:
            if part.conversation.sequence_id is None:
                part.conversation.sequence_id = self.cells.free_ids.pop(0)
        batch = self._batch(sorted(parts, key=_sequence_id))
        outcome = self.backend.decode(batch)
        if outcome is DecodeOutcome.OK:
            count = batch.output_count
            return self.backend.logits(count) if count else np.empty((0, self.vocabulary_size), np.float32)
        for part in parts:
            # The cache may hold a part of the batch.
            self.cells.trim(part.conversation, part.conversation.held)
        if outcome is DecodeOutcome.NO_KV:
            return None
        raise GenerationError(f"the step failed ({outcome.value})")

    def _batch(self, parts: Sequence[_Part]) -> TokenBatch:
        """Return the arrays of a step over ``parts``, in ascending order of sequence id."""
        held, ids = [part.conversation.held for part in parts], list(map(_sequence_id, parts))
        if all(len(part.tokens) == part.outputs == 1 and not is_cell(part.tokens[0]) for part in parts):
            return single_tokens([part.tokens[0] for part in parts], held, ids)
        counts = [len(part.tokens) for part in parts]
        starts = itertools.accumulate(counts, initial=0)
        flags = [np.arange(len(part.tokens)) >= len(part.tokens) - part.outputs for part in parts]
        return TokenBatch(
            np.concatenate([self.media.ids(part.tokens) for part in parts]),
            np.concatenate([np.arange(at, at + n, dtype=np.int32) for at, n in zip(held, counts, strict=True)]),
            np.concatenate([np.full(n, one, np.int32) for one, n in zip(ids, counts, strict=True)]),
            np.concatenate(flags).astype(np.int8),
            media=[
                rows for part, start in zip(parts, starts, strict=False) for rows in self.media.rows(part.tokens, start)
            ],
        )

    def save(self, path: str | Path) -> None:
        """Write all conversations to ``path``, for `open`. Waits until the model's files are read. Raises OSError."""
        self.check()
        self.save_all(self.conversations, path)

    def load(self, saved: str | Path | bytes) -> Conversation:
        """Return a new conversation, equal to the one that `Conversation.save` saved, from its bytes or its file.

        Where its cells do not fit, its tokens are computed again when it is prompted. Waits until the model's files are
        read. Raises StateError, OSError.
        """
        self.check()
        batch = decode(saved if isinstance(saved, bytes) else Path(saved).read_bytes())
        if len(batch.conversations) != 1:
            raise StateError(f"this is a batch of {len(batch.conversations)} conversations: use Executor.open")
        (conversation,) = self._load_all(batch)
        return conversation

    def _load_all(self, batch: SavedBatch) -> list[Conversation]:
        contents = self._contents.known()
        if (batch.model_fingerprint, batch.vocabulary_size) != (contents.model, self.vocabulary_size):
            raise StateError("the saved conversation belongs to another model")
        if batch.media and batch.media_fingerprint != contents.projector:
            raise StateError("the saved conversation has images or audio of another projector")
        try:
            batch = batch.with_cells(self.media.numbers_of(batch.media))
        except RequestError as error:
            raise StateError(str(error)) from None
        longest = self.backend.capacity.current.cells_per_sequence
        for saved in batch.conversations:
            if len(saved.tokens) > longest:
                raise StateError(f"a sequence has at most {longest} tokens. Saved: {len(saved.tokens)}")
        same_cells = batch.cells_fingerprint == self.backend.contents.state_fingerprint
        is_usable = same_cells and self.cells.saving is not Saving.NOTHING
        conversations = list[Conversation]()
        try:
            for saved, slices in zip(batch.conversations, slices_of(batch), strict=True):
                conversation = self.create()
                conversations.append(conversation)
                conversation.restore(saved)
                if is_usable and slices and self.cells.free_ids:
                    source_id = conversations[saved.source].sequence_id if saved.shared else None
                    shared = None if source_id is None else PrefixCopy(source_id=source_id, length=saved.shared)
                    spans = self.media.spans(saved.tokens[: saved.held])
                    if self.backend.restore(self.cells.free_ids[0], slices, shared, spans):
                        conversation.sequence_id, conversation.held = self.cells.free_ids.pop(0), saved.held
                conversation.note_held(conversation.held)
        except BaseException:
            for conversation in conversations:
                self.end(conversation)
            raise
        return conversations

    # For conversations.

    @property
    def chat_prompts(self) -> "ChatPrompts":
        """What turns messages into tokens, made when it is first needed. It ends with the executor."""
        if self._chat_prompts is None:
            # Imported here, since it needs half a second and all of HTTP.
            from caravan.chat_prompts import ChatPrompts

            self._chat_prompts = ChatPrompts(self.backend, self._max_tokenize_bytes)
            self._closing.callback(self._chat_prompts.close)
        return self._chat_prompts

    def check(self) -> None:
        """Raise ClosedError, ForkedError or WrongThreadError if this thread may not use the executor."""
        self._process.check("executor")
        if not self._close.alive:
            raise ClosedError("the executor is closed")
        if threading.get_ident() != self._thread:
            raise WrongThreadError("an executor belongs to the thread that made it")

    def end(self, conversation: Conversation) -> None:
        """Free the cells of the conversation, and forget it."""
        self.check()
        self.cells.forget(conversation)
        del self._conversations[conversation]
        self._ended += 1
        # To find what is not used any more takes as long as all other conversations are.
        if 2 * self._ended >= len(self._conversations):
            self._ended = 0
            self.media.keep(other.tokens for other in self._conversations)

    def save_all(self, conversations: Sequence[Conversation], path: str | Path | None) -> bytes:
        """Return the bytes of ``conversations``, and write them to ``path`` if it is given."""
        contents = self._contents.known()
        saved = list[SavedConversation]()
        for conversation in conversations:
            saved.append(self._saved(conversation, saved))
        data = encode(
            SavedBatch(
                model=self._model,
                model_fingerprint=contents.model,
                cells_fingerprint=self.backend.contents.state_fingerprint,
                vocabulary_size=self.vocabulary_size,
                conversations=saved,
                media=(media := self.media.used_in(one.tokens for one in saved)),
                media_fingerprint=contents.projector,
                cells=self.media.numbers_of(media),
            )
        )
        if path is not None:
            Path(path).write_bytes(data)
        return data

    def _saved(self, conversation: Conversation, earlier: Sequence[SavedConversation]) -> SavedConversation:
        held, sequence_id = conversation.held, conversation.sequence_id
        if sequence_id is None or not held or self.cells.saving is Saving.NOTHING:
            return conversation.saved(NO_BYTES, held=0)
        source, shared = find_shared(conversation.tokens[:held], earlier)
        cells: State | None = NO_BYTES
        state: State | None = NO_BYTES
        if shared < held:
            cells = self.backend.save(sequence_id, shared, held, _ANY_SIZE, releasing=False)
        if self.cells.saving is Saving.WITH_STATE:
            state = self.backend.save(sequence_id, held, held, _ANY_SIZE, releasing=False)
        if cells is None or state is None:
            return conversation.saved(NO_BYTES, held=0)
        return replace(conversation.saved(cells, held=held, source=source, shared=shared), state=state)


def _sequence_id(part: _Part) -> int:
    assert part.conversation.sequence_id is not None
    return part.conversation.sequence_id
