"""Shows parts of prompts as pictures that spell the same tokens, so that tests of text are tests of pictures."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest

from caravan_proto.messages.media import MediaFacts, MediaSpan
from caravan_router.engine.batcher import Batcher
from caravan_scheduler.core.generation import GenerationSpec
from caravan_scheduler.core.media import Picture
from caravan_scheduler.core.prompt_media import PromptMedia, cell_numbers
from caravan_shard.backends.toy.media import ToyEncoder
from caravan_testing.media_prompts import spelled_bytes
from caravan_testing.projectors import CELLS, PATCH, SIDE, Speller

_BYTES = 256


@dataclass(frozen=True, kw_only=True)
class Shower:
    """Makes a ``picture`` of ``cells`` tokens that it ``knows``, of each ``block`` tokens of a prompt.

    Prompts that begin alike thus begin with the same pictures.
    """

    facts: MediaFacts
    picture: Callable[[Sequence[int]], Picture]
    knows: Callable[[int], bool]
    cells: int
    block: int

    def shown(self, spec: GenerationSpec) -> GenerationSpec:
        """Return ``spec`` with pictures in its prompt, and the output that it has without.

        It is left as it is if its output or reply depends on which tokens its prompt has: penalties and logprobs of
        prompts leave media out.
        """
        sampling = spec.sampling
        if (
            spec.media is not None
            or spec.prompt_logprobs
            or sampling.repetition_penalty != 1
            or sampling.dry_multiplier
        ):
            return spec
        prompt, spans, contents = list(spec.prompt), [], {}
        for start in self._places(spec.prompt):
            picture = self.picture(spec.prompt[start : start + self.cells])
            positions = int(self.cells**0.5) if self.facts.atomic else self.cells
            span = MediaSpan(offset=start, media_id=picture.id, count=self.cells, positions=positions)
            prompt[start : start + self.cells] = cell_numbers(span, self.facts.fingerprint)
            spans.append(span)
            contents[picture.id] = picture
        if not spans:
            return spec
        media = PromptMedia(
            spans=tuple(spans), contents=contents, encoder=self.facts.fingerprint, atomic=self.facts.atomic
        )
        return replace(spec, prompt=tuple(prompt), media=media)

    def _places(self, prompt: Sequence[int]) -> Iterator[int]:
        """Yield where pictures begin. The last tokens stay text, as they do in a chat."""
        for start in range(2, len(prompt) - self.cells, self.block):
            if all(map(self.knows, prompt[start : start + self.cells])):
                yield start


def toy_shower(*, atomic: bool) -> Shower:
    """Return what shows prompts of the toy."""
    return Shower(
        facts=ToyEncoder(atomic=atomic).facts,
        picture=lambda tokens: Picture.of(*spelled_bytes(bytes(tokens))),
        knows=lambda token: 0 <= token < _BYTES,
        cells=5,
        block=8,
    )


def spelling_shower(speller: Speller, facts: MediaFacts) -> Shower:
    """Return what shows prompts of a model with the projector of ``speller``."""
    known, side = set(speller.token_ids), SIDE * PATCH
    return Shower(
        facts=facts,
        picture=lambda tokens: Picture.of(side, side, speller.picture(tokens).tobytes()),
        knows=known.__contains__,
        cells=CELLS,
        block=CELLS + 4,
    )


def show_all(monkeypatch: pytest.MonkeyPatch, shower: Shower) -> None:
    """Show parts of all prompts from now on."""
    submit = Batcher.submit
    monkeypatch.setattr(Batcher, "submit", lambda self, spec, *rest: submit(self, shower.shown(spec), *rest))
