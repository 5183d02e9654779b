"""One growing list of tokens, stepped by hand."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, Unpack

import numpy as np
from numpy.typing import NDArray

from caravan.embeddings import Embeddings, embeddings_of
from caravan.errors import (
    AlreadyPrompted,
    CacheFull,
    CaravanError,
    ConversationEnded,
    NeedsInfer,
    NeedsPrompt,
    RequestError,
    TooLong,
)
from caravan.executor_media import ExecutorMedia
from caravan.executor_sampling import CustomSampler, Ending, Sampler, Stop, ending_of
from caravan.media import PlacedMedia, PromptMedia, media_of
from caravan.outputs import Token
from caravan.prompts import ChatCall, Messages, MessagesOptions, chat_fields_of, check_messages, token_ids_of
from caravan.sampling_params import SamplingParams
from caravan.saved_state import SavedConversation
from caravan.token_choice import History, KeptLogprobs, TokenChooser, new_seed, with_seed
from caravan.twins import Closing
from caravan_dialects.text.assembler import Assembler, Piece
from caravan_dialects.text.detokenize import display_text
from caravan_proto.messages.results import FinishReason
from caravan_scheduler.core.prompt_media import is_cell, text_ids
from caravan_scheduler.core.tokens import GeneratedToken, common_length
from caravan_scheduler.shard.checkpoints import thinned
from caravan_shard import arrays
from caravan_shard.backends.base import Backend, CellSlice
from caravan_shard.media import CellSpan, spans_before
from caravan_shard.sampling import sampler as shard_sampler

if TYPE_CHECKING:
    from caravan.chat_prompts import ChatPrompts
    from caravan.executor_cells import ExecutorCells

_C = TypeVar("_C")
_ANY_SIZE = 1 << 62

_Item = str | int | Token | PromptMedia | Embeddings | NDArray[np.floating[Any]]
Promptable = _Item | Sequence[_Item]

GREEDY = SamplingParams(temperature=0.0)


class State(Enum):
    """The stage of a conversation.

    ``IDLE``: it has no logits, since it is new or was cut back; prompt it. ``PENDING``: it waits for `Executor.infer`.
    ``READY``: it has logits. ``ENDED``: it was closed.
    """

    IDLE = "idle"
    PENDING = "pending"
    READY = "ready"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Inference(Generic[_C]):
    """What one step did with the conversations that waited.

    ``done``: they are ready. ``waiting``: they have more tokens than the step had room for; call again. ``starved``:
    the cache has no room, or no sequence, for them; they are as they were. With ``unload_idle``, they wait instead
    unless nothing fits.
    """

    done: tuple[_C, ...]
    waiting: tuple[_C, ...]
    starved: tuple[_C, ...]


@dataclass(slots=True)
class CutPlaces:
    """States of a conversation, by how many of its tokens they stand for. Old ones are given up as `thinned` says."""

    _states: dict[int, arrays.State] = field(default_factory=dict)

    def copy(self) -> "CutPlaces":
        """Return those of a fork."""
        return CutPlaces(dict(self._states))

    def note(self, backend: Backend, sequence_id: int) -> None:
        """Save the state after all tokens that the sequence holds."""
        length = backend.length(sequence_id)
        if length in self._states:
            return
        state = backend.save(sequence_id, length, length, _ANY_SIZE, releasing=False)
        if state is not None:
            self._states[length] = state
            for gone in thinned(sorted(self._states), ()):
                del self._states[gone]

    def cut(self, backend: Backend, sequence_id: int, length: int, spans: Sequence[CellSpan] = ()) -> int:
        """Cut the sequence back to a state within its first ``length`` tokens. Return where; 0 if nothing is held.

        ``spans``: the media among these tokens that must not be cut.
        """
        self.forget_behind(length)
        place = max(self._states, default=0)
        cells = backend.save(sequence_id, 0, place, _ANY_SIZE, releasing=False) if place else None
        backend.trim(sequence_id, 0)
        if cells is None:
            return 0
        slices = [
            CellSlice(state=cells, first=0, start=0, end=place),
            CellSlice(state=self._states[place], first=place, start=place, end=place),
        ]
        return place if backend.restore(sequence_id, slices, None, spans_before(spans, place)) else 0

    def forget_behind(self, length: int) -> None:
        """Forget the states of more than ``length`` tokens."""
        self._states = {place: state for place, state in self._states.items() if place <= length}


class Owner(Protocol):
    """What a conversation needs of its executor."""

    backend: Backend
    media: ExecutorMedia
    sampler: shard_sampler.Sampler

    @property
    def cells(self) -> "ExecutorCells": ...

    @property
    def chat_prompts(self) -> "ChatPrompts": ...

    @property
    def vocabulary_size(self) -> int: ...

    def check(self) -> None: ...

    def create(self) -> "Conversation": ...

    def infer(self) -> "Inference[Conversation]": ...

    def end(self, conversation: "Conversation") -> None: ...

    def save_all(self, conversations: "Sequence[Conversation]", path: str | Path | None) -> bytes: ...


def _items(prompt: Promptable) -> Iterable[_Item]:
    if isinstance(prompt, str | int | np.integer | Token):
        return [prompt]
    if (media := media_of(prompt) or embeddings_of(prompt)) is not None:
        return [media]
    if not isinstance(prompt, Iterable):
        kinds = "a text, a token, an image, audio, embeddings"
        raise RequestError(f"a prompt is {kinds}, or a list of them. Given: {prompt!r:.80}")
    return prompt


class Conversation(Closing):
    """A list of tokens, and the logits after its last ones. `Executor.create` makes it.

    Every call that does not fit the state raises a ConversationError and changes nothing. After any change of the
    tokens, logits equal those of the tokens computed from the start: cells are never moved but computed again.
    """

    def __init__(self, executor: Owner) -> None:
        """Use `Executor.create`."""
        self._executor = executor
        self._tokens: list[int] = []
        # Which tokens were sampled: penalties of outputs count these.
        self._outputs: list[bool] = []
        # How many messages the last prompt was made of, and the place of the first that it kept, if it left out some.
        self._kept_from = 0, 0
        self._waits = False
        self._ended = False
        # Tokens from this one on get logits when they are computed.
        self._first_output = 0
        self._logits: NDArray[np.float32] | None = None
        # Another number after each change but that tokens were appended.
        self._edits = 0
        self._chooser: TokenChooser | None = None
        self._logprobs = KeptLogprobs(executor.sampler)
        # The sequence of the backend that holds the first ``held`` tokens; None if none does.
        self.sequence_id: int | None = None
        self.held = 0
        self.cut_places = CutPlaces()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.state.value}, {self.token_count} tokens>"

    @property
    def state(self) -> State:
        """The stage of the conversation."""
        if self._ended:
            return State.ENDED
        if self._waits:
            return State.PENDING
        return State.IDLE if self._logits is None else State.READY

    @property
    def tokens(self) -> list[int]:
        """All token ids, those that wait included. Each cell of an image or audio has a number above all ids."""
        return list(self._tokens)

    @property
    def token_count(self) -> int:
        """Number of tokens, those that wait included."""
        return len(self._tokens)

    @property
    def media(self) -> list[PlacedMedia]:
        """The images and audio among the tokens, in their order."""
        self._check()
        return self._executor.media.places(self._tokens)

    @property
    def text(self) -> str:
        """The text of all tokens, without control tokens."""
        self._check()
        pieces = map(self._executor.backend.vocabulary.piece, text_ids(self._tokens))
        return b"".join(piece.data for piece in pieces if not piece.special).decode("utf-8", "replace")

    def prompt(self, prompt: Promptable, *, all_logits: bool = False) -> None:
        """Append a text, a token, an image, audio, embeddings, or several of them, for the next `Executor.infer`.

        An image is one of Pillow's or a `Picture`. Embeddings are `Embeddings`, or an array [tokens, size] of floats,
        which the model reads in place of tokens. Before a first text or image, but not before embeddings, comes what
        the model puts before every text. ``all_logits``: keep the logits after each of these tokens, not after the last
        one only. An empty list asks for the logits of a conversation that was cut back. Raises AlreadyPrompted,
        TooLong, RequestError.
        """
        self._check_unprompted()
        tokens, outputs = list[int](), list[bool]()
        for item in _items(prompt):
            new = self._tokens_of(item, is_first=not (self._tokens or tokens))
            tokens += new
            outputs += [isinstance(item, Token)] * len(new)
        self._check_ids(tokens)
        if not tokens and (self._logits is not None or not self._tokens):
            raise RequestError("the prompt has no token")
        self._check_length(len(self._tokens) + len(tokens))
        last = len(self._tokens) + len(tokens) - 1
        self._first_output = min(len(self._tokens), last) if all_logits else last
        self._tokens += tokens
        self._outputs += outputs
        self._wait()

    def _tokens_of(self, item: _Item, *, is_first: bool) -> list[int]:
        """Return the tokens of one part of a prompt. ``is_first``: nothing is before it."""
        tokenize = self._executor.backend.vocabulary.tokenize
        if isinstance(item, str):
            return tokenize(item, add_special=is_first, parse_special=True)
        if isinstance(item, Token):
            return [item.id]
        if (media := media_of(item) or embeddings_of(item)) is not None:
            begins = is_first and not isinstance(media, Embeddings)
            begin = tokenize("", add_special=True, parse_special=True) if begins else []
            return begin + self._executor.media.tokens_of(media)
        return [*token_ids_of([item])]

    def prompt_messages(
        self, messages: Messages, *, add_generation_prompt: bool | None = None, **options: Unpack[MessagesOptions]
    ) -> list[int]:
        """Let it have the prompt that `LLM.chat` makes of all ``messages``; `Executor.infer` computes what is new.

        Return the places of the messages that are left out, see ``truncation`` of `LLM.chat`.

        Its tokens stay as far as they stand for the same text, also where the tokenizer would split a reply otherwise;
        later ones are replaced. ``add_generation_prompt``: open the assistant's turn at the end; None for the rule of
        `LLM.chat`, by which the model continues an assistant's message at the end. All tokens count as the prompt, not
        as outputs. Raises AlreadyPrompted, TooLong, RequestError.
        """
        self._check_unprompted()
        fields = chat_fields_of(options, MessagesOptions) | {"add_generation_prompt": add_generation_prompt}
        check_messages(messages)
        known, kept_from = self._kept_from
        # Fewer messages are another chat.
        before = kept_from if len(messages) >= known else 0
        call = ChatCall(fields, exact=tuple(self._tokens), before=before)
        tokens, left_out = self._executor.chat_prompts.tokens(messages, call)
        if not tokens:
            raise RequestError("the prompt has no token")
        self._check_length(len(tokens))
        if tokens != self._tokens or self._logits is None:
            self._become(tokens)
        self._outputs = [False] * len(tokens)
        self._edits += 1
        self._kept_from = len(messages), left_out[-1] + 1 if left_out else 0
        return left_out

    def logits(self, offset: int = 0) -> NDArray[np.float32]:
        """Return the logits [vocabulary] after the last token but ``offset``, in a new array.

        Raises NeedsInfer, NeedsPrompt, and IndexError if the logits after that token were not kept.
        """
        row: NDArray[np.float32] = self._row(offset)[0].copy()
        return row

    def _row(self, offset: int) -> NDArray[np.float32]:
        """Return the logits [1, vocabulary] after the last token but ``offset``, which must not be changed."""
        rows = self._rows()
        if not 0 <= offset < len(rows):
            raise IndexError(f"logits were kept after the last {len(rows)} tokens. Given: {offset}")
        at = len(rows) - 1 - offset
        return rows[at : at + 1]

    def sample(self, sampler: Sampler = GREEDY, *, offset: int = 0) -> Token:
        """Choose the token that follows, by parameters or by a function of the logits; append nothing.

        Of `SamplingParams`, those count that choose a token: sampling depends on ``seed`` and the number of tokens, as
        in the server. Raises NeedsInfer, NeedsPrompt, RequestError.
        """
        if isinstance(sampler, SamplingParams):
            if self._chooser is None or not self._chooser.serves(sampler):
                self._chooser = self._chooser_of(sampler)
            return self._sampled(self._chooser, offset, new_seed(sampler))
        return self._sampled(sampler, offset)

    def _chooser_of(self, params: SamplingParams) -> TokenChooser:
        return TokenChooser(self._executor.backend, self._executor.sampler, params)

    def _sampled(self, sampler: TokenChooser | CustomSampler, offset: int = 0, seed: int | None = None) -> Token:
        """Choose the token that follows the last one but ``offset``. ``seed``: instead of that of the parameters."""
        backend, logits = self._executor.backend, self._row(offset)
        if isinstance(sampler, TokenChooser):
            end = len(self._tokens) - offset
            tokens, outputs = (self._tokens[:end], self._outputs[:end]) if offset else (self._tokens, self._outputs)
            token = sampler.choose(logits, History(tokens, outputs, self._edits), seed)
        elif callable(sampler):
            token = int(sampler(logits[0].copy()))
            self._check_ids([token])
        else:
            raise RequestError(f"a sampler is SamplingParams or a function of the logits. Given: {sampler!r:.80}")
        piece = backend.vocabulary.piece(token)
        return Token(
            id=token,
            piece=piece.data,
            special=piece.special,
            ends=token in backend.facts.eos_token_ids,
            text="" if piece.special else display_text(piece.data),
            _logprob=self._logprobs.of(logits, token),
        )

    def generate(
        self, max_tokens: int | None = None, sampler: Sampler = GREEDY, stop: Stop | None = None
    ) -> Iterator[Token]:
        """Sample and append up to ``max_tokens`` tokens, and yield each before it is appended.

        ``max_tokens``: None for that of the parameters, which counts too where it is set. ``stop``: a function that
        says of a token that the output ends, or stop strings and ids of tokens, beside those of the parameters. The
        token that ends the output is not appended. The texts of all tokens, joined, are the text of `LLM.generate`, cut
        at a stop string: tokens that may begin one are appended before they are yielded.

        Raises RequestError, also for parameters that have no meaning here, and CacheFull if there is no room; the last
        token waits then, and `Executor.infer` continues.
        """
        moves = self.generation(max_tokens, sampler, stop)
        return (move for move in moves if move is not None)

    def fork(self) -> "Conversation":
        """Return a conversation with the same tokens, those that wait included, and the same logits.

        In the unified layout both share the cells of what is computed.
        """
        self._check()
        other = self._executor.create()
        other._copy(self)
        return other

    def _copy(self, source: "Conversation") -> None:
        self._tokens, self._outputs = list(source._tokens), list(source._outputs)
        self._kept_from = source._kept_from
        self._waits, self._first_output, self._logits = source._waits, source._first_output, source._logits
        self._executor.cells.share(source, self)
        self.note_held(self.held)

    def rewind(self, count: int) -> None:
        """Remove the last ``count`` tokens.

        Raises NeedsInfer, ValueError if there are fewer, and RequestError if that leaves part of an image that the
        model reads as a whole only.
        """
        self._check_computed()
        if not 0 <= count <= len(self._tokens):
            raise ValueError(f"there are {len(self._tokens)} tokens. Given: {count}")
        if count:
            length = len(self._tokens) - count
            self._executor.media.check(self._tokens[:length])
            del self._tokens[length:], self._outputs[length:]
            self._edits += 1
            self._executor.cells.trim(self, length)
            self._logits = None

    def shift_left(self, count: int, keep: int = 0) -> None:
        """Remove ``count`` tokens after the first ``keep``; all after them are computed again by `Executor.infer`.

        Raises NeedsInfer, and ValueError if there are fewer tokens.
        """
        self._check_computed()
        if count < 0 or keep < 0 or keep + count > len(self._tokens):
            raise ValueError(f"there are {len(self._tokens)} tokens. Given: {count} behind {keep}")
        self.modify(lambda tokens: tokens[:keep] + tokens[keep + count :])

    def modify(self, edit: Callable[[list[int]], Sequence[int]]) -> None:
        """Replace the tokens by what ``edit`` returns for them. Tokens after the common prefix are computed again.

        Raises NeedsInfer, TooLong, RequestError.
        """
        self._check_computed()
        tokens = list(map(index, edit(list(self._tokens))))
        self._check_ids(tokens)
        self._check_length(len(tokens))
        if tokens != self._tokens:
            self._become(tokens)

    def remove(self, media: PlacedMedia | PromptMedia) -> None:
        """Remove an image or audio, one of `media`, or wherever it is; what follows is computed again by `modify`.

        Raises NeedsInfer, and ValueError if it is not there.
        """
        self._check_computed()
        wanted = media if isinstance(media, PlacedMedia) else media_of(media)
        removed = [one for one in self.media if wanted in (one, one.media)]
        if not removed:
            raise ValueError("the conversation does not have this image or audio there")
        places = {place for one in removed for place in range(one.start, one.stop)}
        self.modify(lambda tokens: [token for place, token in enumerate(tokens) if place not in places])

    def unload(self) -> None:
        """Free the cells; tokens and logits stay. When it is prompted next, the tokens are computed again.

        With ``unload_idle``, the cells wait in host memory instead, as long as there is room.
        """
        self._check()
        self._executor.cells.unload(self)

    def save(self, path: str | Path | None = None) -> bytes:
        """Return the conversation as bytes, and write them to ``path`` if it is given."""
        self._check()
        return self._executor.save_all([self], path)

    def close(self) -> None:
        """End it, and free its cells. Closing it again does nothing."""
        if not self._ended:
            self._executor.end(self)
            self._ended, self._waits, self._logits = True, False, None

    # For `AsyncConversation`.

    def generation(self, max_tokens: int | None, sampler: Sampler, stop: Stop | None) -> Iterator[Token | None]:
        """Yield what `generate` does, and None before each step, so that other conversations may join the step."""
        if not (max_tokens is None or type(max_tokens) is int):
            raise RequestError(f"`max_tokens` must be a whole number, or None. Given: {max_tokens!r:.80}")
        backend = self._executor.backend
        room = backend.capacity.current.cells_per_sequence - len(self._tokens)
        return self._generated(sampler, ending_of(backend, sampler, max_tokens, stop, room))

    def _generated(self, sampler: Sampler, ending: Ending) -> Iterator[Token | None]:
        """Yield the tokens of an output with their texts, and None before each step.

        Each is yielded before it is appended, or later if its text might have belonged to a stop string. The one that
        ends the output is not appended, unless it is the last of ``max_new_tokens``.
        """
        assembler, held = Assembler(ending.text), deque[Token]()
        by = self._chooser_of(with_seed(sampler)) if isinstance(sampler, SamplingParams) else sampler

        def released(pieces: Sequence[Piece]) -> Iterator[Token]:
            for piece in pieces:
                token = held.popleft()
                yield token if token.text == piece.text else replace(token, text=piece.text)

        try:
            for count in range(1, ending.stopping.max_new_tokens + 1):
                yield from self._steps()
                token = self._sampled(by)
                held.append(token)
                finish = ending.finish(token, count)
                pieces = assembler.push(GeneratedToken(token.id, token.piece, token.special, None, (), finish))
                yield from released(pieces)
                if pieces and pieces[-1].finish not in (None, FinishReason.LENGTH):
                    return
                self.prompt(token)
            yield from self._steps()
        except CaravanError:
            yield from released(assembler.flush())
            raise

    def _steps(self) -> Iterator[None]:
        """Compute what waits, and yield before each step. Raises CacheFull."""
        while self._waits:
            yield None
            if self.waiting and self in self._executor.infer().starved:
                raise CacheFull("the cache has no room: close or unload another conversation")

    # For the executor.

    @property
    def waiting(self) -> list[int]:
        """The tokens that are not held, if it waits for them."""
        return self._tokens[self.held :] if self._waits else []

    @property
    def first_output(self) -> int:
        """The first token after which logits are wanted."""
        return self._first_output

    def advance(self, count: int, rows: NDArray[np.float32]) -> None:
        """Note that ``count`` more tokens are held, with ``rows`` of logits [outputs, vocabulary]."""
        self.held += count
        kept = rows.copy()
        self._logits = kept if self._logits is None else np.concatenate([self._logits, kept])
        self._waits = self.held < len(self._tokens)

    def note_held(self, length: int) -> None:
        """Note that only ``length`` tokens are held. The others are computed again if it waits, with their logits."""
        self.held = length
        if self._waits and self._logits is not None:
            self._logits = self._logits[: max(0, length - self._first_output)]

    def saved(self, cells: NDArray[np.uint8], *, held: int, source: int = 0, shared: int = 0) -> SavedConversation:
        """Return what `Executor.save` writes of this conversation. The parameters are fields of the result."""
        size = self._executor.vocabulary_size
        return SavedConversation(
            tokens=self._tokens,
            outputs=self._outputs,
            waits=self._waits,
            first_output=self._first_output,
            logits=np.empty((0, size), np.float32) if self._logits is None else self._logits,
            held=held,
            source=source,
            shared=shared,
            cells=cells,
        )

    def restore(self, saved: SavedConversation) -> None:
        """Take over all that was saved but the cells."""
        self._tokens, self._outputs = list(saved.tokens), list(saved.outputs)
        self._waits, self._first_output = saved.waits, saved.first_output
        # The array that was read is a part of all bytes of the file.
        self._logits = saved.logits.copy() if len(saved.logits) else None

    def _become(self, tokens: list[int]) -> None:
        """Have ``tokens``, of which those after the common prefix are computed again."""
        common = common_length(tokens, self._tokens)
        self._executor.cells.trim(self, common)
        self._outputs = self._outputs[:common] + [False] * (len(tokens) - common)
        self._tokens, self._logits = tokens, None
        self._edits += 1
        if tokens:
            self._first_output = len(tokens) - 1
            self._wait()

    def _wait(self) -> None:
        self._waits, self._logits = True, None
        self._logprobs.advance()
        # At least the last token is computed, for its logits.
        length = min(self._first_output, len(self._tokens) - 1)
        if length < self.held:
            self._executor.cells.trim(self, length)

    def _rows(self) -> NDArray[np.float32]:
        self._check_computed()
        if self._logits is None:
            raise NeedsPrompt("it has no logits: prompt it, and call Executor.infer")
        return self._logits

    def _check_unprompted(self) -> None:
        self._check()
        if self._waits:
            raise AlreadyPrompted("call Executor.infer before the next prompt")

    def _check_computed(self) -> None:
        self._check()
        if self._waits:
            raise NeedsInfer("it has tokens that are not computed: call Executor.infer")

    def _check(self) -> None:
        self._executor.check()
        if self._ended:
            raise ConversationEnded("the conversation was closed")

    def _check_ids(self, tokens: Sequence[int]) -> None:
        size = self._executor.backend.facts.vocabulary_size
        for token in tokens:
            if not 0 <= token < size and not is_cell(token):
                raise RequestError(f"token ids must be >= 0 and < {size}. Given: {token}")
        self._executor.media.check(tokens)

    def _check_length(self, length: int) -> None:
        most = self._executor.backend.capacity.current.cells_per_sequence
        if length > most:
            raise TooLong(f"a sequence has at most {most} tokens. Given: {length}")
