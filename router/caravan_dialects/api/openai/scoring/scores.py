"""Computes the scores of pairs of texts."""

import asyncio
import operator
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from caravan_dialects.api.generation.context import Context
from caravan_dialects.api.generation.prompt import check_texts, check_token_ids, nth
from caravan_dialects.api.generation.rules import empty_prompt_error, too_many_prompts_error
from caravan_dialects.api.openai.embeddings.vectors import TextsOf, Vectors

# The event loop serves others after this number of products of vectors, which take about 10 ms.
_PAIRS_PER_TURN = 64


@dataclass(frozen=True, slots=True)
class Texts:
    """The texts of one side of the pairs, and the field that they came in."""

    field: str
    texts: Sequence[str]

    @property
    def places(self) -> list[str]:
        """What to call each text."""
        return [nth(self.field, index, len(self.texts)) for index in range(len(self.texts))]


@dataclass(frozen=True, slots=True)
class Scores:
    """``values`` has one score per pair. ``tokens`` counts what was computed: each different text, or each pair."""

    model: str
    values: list[float]
    tokens: int


# Embeds the texts, or for a model that ranks the pairs, whose token ids the function returns.
Embed = Callable[[TextsOf], Awaitable[Vectors]]


async def scores_of(embed: Embed, first: Texts, second: Texts) -> Scores:
    """Score the n-th text of ``first`` with the n-th of ``second``; a side of one text is paired with all of the other.

    Raises RequestError, EngineError.
    """
    count = max(len(first.texts), len(second.texts))
    pairs = [_pair(first, second, index) for index in range(count)] if first.texts and second.texts else []
    sides = {text: place for side in (second, first) for text, place in zip(side.texts, side.places, strict=True)}

    async def texts_of(context: Context) -> list[tuple[int, ...]]:
        for side in (first, second):
            if not side.texts:
                raise empty_prompt_error(side.field)
            if len(side.texts) > context.limits.max_embed_texts:
                raise too_many_prompts_error(side.field, context.limits.max_embed_texts, len(side.texts))
            check_texts(side.field, side.texts, context.bounds)
        if context.model.ranks:
            tokens = await context.engine.queries.tokenize_pairs(pairs)
            longer = second if len(second.texts) > 1 else first if len(first.texts) > 1 else second
            places = longer.places
        else:
            tokens = await context.engine.queries.tokenize_texts([*sides])
            places = [*sides.values()]
        for place, token_ids in zip(places, tokens, strict=True):
            check_token_ids(place, token_ids, context.model.max_embed_tokens, context.model)
        return tokens

    made = await embed(texts_of)
    if made.ranks:
        return Scores(made.model, [relevance for (relevance,) in made.vectors], made.tokens)
    vectors = dict(zip(sides, made.vectors, strict=True))
    values = []
    for index, (one, other) in enumerate(pairs):
        if index % _PAIRS_PER_TURN == 0:
            await asyncio.sleep(0)
        values.append(sum(map(operator.mul, vectors[one], vectors[other])))
    return Scores(made.model, values, made.tokens)


def _pair(first: Texts, second: Texts, index: int) -> tuple[str, str]:
    one, other = (side.texts[index if len(side.texts) > 1 else 0] for side in (first, second))
    return one, other
