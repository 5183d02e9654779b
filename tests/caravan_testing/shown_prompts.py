"""Shows parts of prompts as pictures that spell the same tokens, so that tests of text are tests of pictures."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from caravan_proto.messages.media import MediaSpan
from caravan_router.core.generation import GenerationSpec
from caravan_router.core.media import Picture
from caravan_router.core.prompt_media import PromptMedia, cell_numbers
from caravan_shard.backends.toy.media import ToyEncoder
from caravan_testing.toy_media import spelled_bytes

# Of each eight tokens, so many are shown. Prompts that begin alike thus begin with the same pictures.
_BLOCK = 8
_SHOWN = 5
_BYTES = 256


def shown(spec: GenerationSpec, encoder: ToyEncoder) -> GenerationSpec:
    """Return ``spec`` with pictures in its prompt, and the output that it has without.

    It is left as it is if its output or reply depends on which tokens its prompt has: penalties and logprobs of prompts
    leave media out.
    """
    sampling = spec.sampling
    if spec.media is not None or spec.prompt_logprobs or sampling.repetition_penalty != 1 or sampling.dry_multiplier:
        return spec
    prompt, spans, contents = list(spec.prompt), [], {}
    for start in _places(spec.prompt):
        picture = Picture.of(*spelled_bytes(bytes(spec.prompt[start : start + _SHOWN])))
        sizes = encoder.facts
        count = _SHOWN
        positions = int(count**0.5) if sizes.atomic else count
        span = MediaSpan(offset=start, media_id=picture.id, count=count, positions=positions)
        prompt[start : start + count] = cell_numbers(span, sizes.fingerprint)
        spans.append(span)
        contents[picture.id] = picture
    if not spans:
        return spec
    media = PromptMedia(
        spans=tuple(spans), contents=contents, encoder=encoder.facts.fingerprint, atomic=encoder.facts.atomic
    )
    return replace(spec, prompt=tuple(prompt), media=media)


def _places(prompt: Sequence[int]) -> Iterator[int]:
    """Yield where pictures begin. The last tokens stay text, as they must in a chat."""
    for start in range(2, len(prompt) - _SHOWN, _BLOCK):
        if all(0 <= token < _BYTES for token in prompt[start : start + _SHOWN]):
            yield start
