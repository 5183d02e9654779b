"""Generations for the engine on the toy model, and their expected output."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from caravan_proto.messages.sampling import SamplingParams
from caravan_router.engine.batcher import Batcher
from caravan_router.engine.streams import RequestStream
from caravan_scheduler.core.generation import ANYONE, GenerationSpec, StoppingParams, Tenant
from caravan_testing.toy_oracle import expected_output


def spec(
    prompt: Iterable[int],
    new_tokens: int,
    *,
    seed: int | None = None,
    priority: int = 0,
    tenant: Tenant = ANYONE,
    session: str = "",
    namespace: str = "",
    timeout_s: float = math.inf,
    adapter: str = "",
    prompt_logprobs: bool = False,
) -> GenerationSpec:
    """Return a spec of exactly ``new_tokens`` tokens: greedy without a seed, else drawn at temperature 1."""
    return GenerationSpec(
        prompt=tuple(prompt),
        sampling=SamplingParams(temperature=0.0) if seed is None else SamplingParams(temperature=1.0, seed=seed),
        stopping=StoppingParams(max_new_tokens=new_tokens, ignore_eos=True),
        priority=priority,
        tenant=tenant,
        session=session,
        namespace=namespace,
        timeout_s=timeout_s,
        adapter=adapter,
        prompt_logprobs=prompt_logprobs,
    )


def with_feedback(wanted: GenerationSpec, kind: int) -> GenerationSpec:
    """Return ``wanted`` with mirostat 1 or 2, or with adaptive-p for 0. The values are exact in float32."""
    fields: dict[str, Any] = {"mirostat": kind, "mirostat_tau": 3.0, "mirostat_eta": 0.125}
    if kind == 0:
        fields = {"adaptive_target": 0.25, "adaptive_decay": 0.75}
    return replace(wanted, sampling=replace(wanted.sampling, **fields))


def undisturbed(wanted: GenerationSpec) -> list[int]:
    """Return the toy model's output for ``wanted`` alone, without interruption."""
    return expected_output(
        wanted.prompt,
        wanted.stopping.max_new_tokens,
        sampling=wanted.sampling,
        ignore_eos=wanted.stopping.ignore_eos,
        stop_token_ids=wanted.stopping.stop_token_ids,
        min_tokens=wanted.stopping.min_tokens,
        adapter=wanted.adapter,
    )


async def read(stream: RequestStream) -> list[int]:
    """Return the tokens of ``stream`` to its end, and close it."""
    try:
        return [token.token_id async for tokens in stream for token in tokens]
    finally:
        stream.close()


async def run(engine: Batcher, wanted: GenerationSpec) -> list[int]:
    """Submit ``wanted`` and return its tokens."""
    return await read(engine.submit(wanted))
