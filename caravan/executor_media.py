"""The images, audio and embeddings in the prompts of an executor's conversations.

Among the tokens of a conversation, each cell of a medium has its own number, as in the server's router. A list of
tokens says by that which media it has, however it was made of others.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from caravan.embeddings import Embeddings
from caravan.errors import GenerationError, RequestError
from caravan.media import PlacedMedia
from caravan_proto.messages.media import MediaFacts, MediaSpan
from caravan_router.engine.media import content_of, shape_of
from caravan_scheduler.core.media import Picture, Sound
from caravan_scheduler.core.prompt_media import FIRST_CELL_NUMBER, cell_numbers, is_cell
from caravan_shard.arrays import Ids
from caravan_shard.backends.base import Backend
from caravan_shard.backends.given_embeddings import slices_of_rows
from caravan_shard.checks.media import check_shape
from caravan_shard.media import (
    NO_TOKEN,
    CellSpan,
    EncodedSlice,
    EncodingError,
    MediaEncoder,
    MediaRows,
    MediaStore,
    SliceSize,
)

# Embeddings that are kept; others are computed again when they are needed.
_KEPT_BYTES = 256 << 20
# In place of the fingerprint of an encoder.
_GIVEN = b"embeddings"


class _Cell(NamedTuple):
    """Cell ``place`` of a ``slice``, whose offset has no meaning."""

    slice: MediaSpan
    place: int


class ExecutorMedia:
    """The media of one executor, by the numbers of their cells. As long as a conversation has them, they are kept."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._store = MediaStore(_KEPT_BYTES)
        self._contents: dict[bytes, Picture | Sound | Embeddings] = {}
        self._cells: dict[int, _Cell] = {}

    def tokens_of(self, media: Picture | Sound | Embeddings) -> list[int]:
        """Return what stands for a medium in a prompt, and know it from now on. Raises RequestError."""
        if isinstance(media, Embeddings):
            return self._rows_of(media)
        encoder = self._encoder(media)
        shape = shape_of(media)
        if (refusal := check_shape(shape, encoder.facts)) is not None:
            raise RequestError(refusal.sentence)
        try:
            layout = encoder.tokenize(shape)
        except EncodingError as error:
            raise RequestError(str(error)) from None
        tokens: list[int] = []
        slices = 0
        for piece in layout:
            if not isinstance(piece, SliceSize):
                tokens += piece
                continue
            span = MediaSpan(
                offset=0, media_id=media.id, slice_index=slices, count=piece.cells, positions=piece.positions
            )
            tokens += self._numbers(span, encoder.facts.fingerprint)
            slices += 1
        self._contents[media.id] = media
        return tokens

    def _rows_of(self, media: Embeddings) -> list[int]:
        """Return the numbers of embeddings, which need no encoder. Raises RequestError."""
        size = self._backend.capacity.input_size
        if media.size != size:
            raise RequestError(f"embeddings of this model have {size} values for each token. Given: {media.size}")
        tokens = list[int]()
        for index, (first, end) in enumerate(self._slices_of(media)):
            count = end - first
            span = MediaSpan(offset=0, media_id=media.id, slice_index=index, count=count, positions=count)
            tokens += self._numbers(span, _GIVEN)
        self._contents[media.id] = media
        return tokens

    def _slices_of(self, media: Embeddings) -> list[tuple[int, int]]:
        """Return the rows [first, end) of each slice: where it is computed whole, as many as fit into a step."""
        encoder = self._backend.media
        return slices_of_rows(
            media.count, media.count if encoder is None or not encoder.facts.atomic else encoder.facts.max_cells
        )

    def _numbers(self, span: MediaSpan, fingerprint: bytes) -> list[int]:
        """Return the numbers of the cells of a slice, and know them from now on."""
        numbers = cell_numbers(span, fingerprint)
        self._cells.update((number, _Cell(span, place)) for place, number in enumerate(numbers))
        return numbers

    def _encoder(self, media: Picture | Sound) -> MediaEncoder:
        encoder = self._backend.media
        if encoder is None or not _reads(encoder.facts, media):
            kind = "images" if isinstance(media, Picture) else "audio"
            raise RequestError(
                f"{self._backend.facts.name} does not read {kind}: open it with a projector (mmproj) that does"
            )
        return encoder

    def check(self, tokens: Sequence[int]) -> None:
        """Raise RequestError if ``tokens`` have unknown cells, or part of a medium that is computed whole only."""
        for at, count in self._runs(tokens):
            cell = self._cells[tokens[at]]
            if self._is_atomic and (cell.place > 0 or count < cell.slice.count):
                raise RequestError("this model reads an image, audio or embeddings as a whole, or not at all")

    @property
    def _is_atomic(self) -> bool:
        return self._backend.media is not None and self._backend.media.facts.atomic

    def _runs(self, tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield where cells of one slice that follow each other begin, and how many these are.

        Raises RequestError for a cell of no conversation.
        """
        at = 0 if _have_cells(tokens) else len(tokens)
        while at < len(tokens):
            count = 1
            if is_cell(tokens[at]):
                if (first := self._cells.get(tokens[at])) is None:
                    raise RequestError(f"no conversation has an image, audio or embeddings with the cell {tokens[at]}")
                most = len(tokens) - at
                while count < most and self._cells.get(tokens[at + count]) == (first.slice, first.place + count):
                    count += 1
                yield at, count
            at += count

    def chunk(self, tokens: Sequence[int], count: int, room: int) -> int:
        """Return how many first ``tokens`` a step takes that should take ``count`` and has ``room``; 0 for none."""
        if not self._is_atomic or count >= len(tokens) or not is_cell(tokens[count]):
            return count
        cell = self._cells[tokens[count]]
        if cell.place == 0 or count > cell.place:
            return count - cell.place
        return cell.slice.count if cell.slice.count <= room else 0

    def ids(self, tokens: Sequence[int]) -> Ids:
        """Return ``tokens`` for a pass, in which cells of media have no token."""
        try:
            return np.array(tokens, np.int32)
        except OverflowError:
            return np.array([NO_TOKEN if is_cell(token) else token for token in tokens], np.int32)

    def rows(self, tokens: Sequence[int], row: int) -> list[MediaRows]:
        """Return the rows of media of a pass that has ``tokens`` from ``row`` on."""
        found = list[MediaRows]()
        for at, count in self._runs(tokens):
            cell = self._cells[tokens[at]]
            piece = self._encoded(cell.slice.media_id)[cell.slice.slice_index]
            found.append(MediaRows(row + at, piece, cell.place, count))
        return found

    def _encoded(self, media_id: bytes) -> Sequence[EncodedSlice]:
        slices = self._store.find(media_id)
        if slices is None:
            media = self._contents[media_id]
            if isinstance(media, Embeddings):
                return [
                    EncodedSlice(embeddings=media.rows[first:end], size=SliceSize(end - first, end - first))
                    for first, end in self._slices_of(media)
                ]
            try:
                slices = self._encoder(media).encode(shape_of(media), content_of(media))
            except EncodingError as error:
                raise GenerationError(f"an image or audio could not be encoded: {error}") from None
            self._store.put(media_id, slices)
        return slices

    def spans(self, tokens: Sequence[int]) -> list[CellSpan]:
        """Return the spans of ``tokens`` that must not be cut."""
        if not self._is_atomic:
            return []
        return [CellSpan(at, at + count, self._cells[tokens[at]].slice.positions) for at, count in self._runs(tokens)]

    def places(self, tokens: Sequence[int]) -> list[PlacedMedia]:
        """Return where ``tokens`` have media, each with the tokens around its cells unless a part is missing."""
        found = list[PlacedMedia]()
        for at, count in self._runs(tokens):
            if found and at < found[-1].stop:
                continue  # another slice of it
            media = self._contents[self._cells[tokens[at]].slice.media_id]
            if isinstance(media, Embeddings):
                continue
            whole = self.tokens_of(media)
            start = at - next(place for place, token in enumerate(whole) if is_cell(token))
            stop = start + len(whole)
            is_whole = start >= 0 and tokens[start:stop] == whole
            found.append(PlacedMedia(media, start, stop) if is_whole else PlacedMedia(media, at, at + count))
        return found

    def used_in(self, texts: Iterable[Sequence[int]]) -> list[Picture | Sound | Embeddings]:
        """Return the media that any of these lists of tokens has."""
        used = {self._cells[token].slice.media_id: None for tokens in texts for token in tokens if is_cell(token)}
        return [self._contents[media_id] for media_id in used]

    def numbers_of(self, media: Iterable[Picture | Sound | Embeddings]) -> list[int]:
        """Return the numbers of all cells of ``media``, which are known from now on. Raises RequestError."""
        return [token for one in media for token in self.tokens_of(one) if is_cell(token)]

    def keep(self, texts: Iterable[Sequence[int]]) -> None:
        """Forget the media that none of these lists of tokens has."""
        if self._contents:
            kept = {media.id for media in self.used_in(texts)}
            self._contents = {key: media for key, media in self._contents.items() if key in kept}
            self._cells = {number: cell for number, cell in self._cells.items() if cell.slice.media_id in kept}


def _have_cells(tokens: Sequence[int]) -> bool:
    return max(tokens, default=0) >= FIRST_CELL_NUMBER


def _reads(facts: MediaFacts, media: Picture | Sound) -> bool:
    return facts.images if isinstance(media, Picture) else facts.audio
