"""Top-n-sigma, the dynamic temperature, mirostat, adaptive-p and the order of samplers: as llama.cpp's own samplers."""

import ctypes
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from caravan_proto.messages.sampling import SAMPLERS, SamplingParams
from caravan_shard.arrays import Floats
from caravan_shard.backends.llama.sampling.filter import LlamaFilter
from caravan_shard.sampling.feedback import Feedback
from caravan_shard.sampling.order import apply_in_order, temperature_of
from caravan_shard.sampling.penalties import make_penalties
from caravan_shard.sampling.token_candidates import find_candidates

pytestmark = pytest.mark.model

SIZE = 3_000
_TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


def apply_llama(logits: Floats, samplers: Sequence[Any], tokens: Sequence[int] = ()) -> dict[int, float]:
    """Return the logits that llama.cpp's ``samplers`` leave behind ``tokens``, by token; -inf is left out."""
    import llama_cpp

    data = np.empty(len(logits), _TOKEN_DATA)
    data["id"], data["logit"] = np.arange(len(logits)), logits
    array = llama_cpp.llama_token_data_array(
        data=ctypes.cast(data.ctypes.data, llama_cpp.llama_token_data_p), size=len(logits), selected=-1, sorted=False
    )
    chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    for sampler in samplers:
        llama_cpp.llama_sampler_chain_add(chain, sampler)
    for token in tokens:
        llama_cpp.llama_sampler_accept(chain, token)
    llama_cpp.llama_sampler_apply(chain, ctypes.byref(array))
    llama_cpp.llama_sampler_free(chain)
    start = (ctypes.addressof(array.data.contents) - data.ctypes.data) // _TOKEN_DATA.itemsize
    rows = data[start : start + array.size]
    pairs = zip(rows["id"].tolist(), rows["logit"].tolist(), strict=True)
    return {token: logit for token, logit in pairs if logit != -np.inf}


def llama_samplers(parameters: SamplingParams) -> Mapping[str, Callable[[], Any]]:
    """Return what makes llama.cpp's sampler of each name, as its server makes it."""
    import llama_cpp as llama

    return {
        "penalties": lambda: llama.llama_sampler_init_penalties(
            SIZE, 64, parameters.repetition_penalty, parameters.frequency_penalty, parameters.presence_penalty
        ),
        "top_n_sigma": lambda: llama.llama_sampler_init_top_n_sigma(parameters.top_n_sigma),
        "top_k": lambda: llama.llama_sampler_init_top_k(parameters.top_k),
        "typ_p": lambda: llama.llama_sampler_init_typical(parameters.typical_p, 0),
        "top_p": lambda: llama.llama_sampler_init_top_p(parameters.top_p, 0),
        "min_p": lambda: llama.llama_sampler_init_min_p(parameters.min_p, 0),
        "xtc": lambda: llama.llama_sampler_init_xtc(1.0, parameters.xtc_threshold, 1, 0),
        "temperature": lambda: llama.llama_sampler_init_temp_ext(
            parameters.temperature, parameters.dynatemp_range, parameters.dynatemp_exponent
        ),
    }


def random_logits(seed: int, scale: float = 2.5) -> Floats:
    return (np.random.default_rng(seed).standard_normal(SIZE) * scale).astype(np.float32)


@pytest.mark.parametrize("sigmas", [0.3, 1.0, 1.5, 2.5, 6.0])
def test_top_n_sigma_keeps_the_tokens_of_llama_cpp(sigmas: float) -> None:
    for seed in range(20):
        logits = random_logits(seed)
        logits[np.random.default_rng(seed).random(SIZE) < seed / 25] = -np.inf
        parameters = SamplingParams(temperature=1.0, top_n_sigma=sigmas)
        mine = set(find_candidates(logits, parameters).ids.tolist())
        finite = logits[logits > -np.inf]
        border = finite.max() - sigmas * finite.std(dtype=np.float64)
        theirs = apply_llama(logits, [llama_samplers(parameters)["top_n_sigma"]()]).keys()
        # llama.cpp's sums are in float32.
        assert all(abs(logits[token] - border) < 1e-3 for token in mine ^ theirs)


@pytest.mark.parametrize("scale", [0.01, 1.0, 2.5, 8.0])
@pytest.mark.parametrize(("temperature", "reach"), [(0.8, 0.5), (1.0, 1.0), (0.0, 0.7), (0.3, 2.0), (2.0, 0.1)])
def test_the_dynamic_temperature_is_llama_cpps(temperature: float, reach: float, scale: float) -> None:
    for seed in range(4):
        logits = random_logits(seed, scale)[: 10**seed]
        for exponent in (0.5, 1.0, 3.0):
            parameters = SamplingParams(temperature=temperature, dynatemp_range=reach, dynatemp_exponent=exponent)
            theirs = apply_llama(logits, [llama_samplers(parameters)["temperature"]()])
            if len(logits) == 1:
                # A single candidate is left as it is.
                assert theirs == {0: float(logits[0])}
                continue
            mine = temperature_of(logits, parameters)
            for token, logit in theirs.items():
                assert logit == pytest.approx(float(logits[token]) / mine, rel=1e-3, abs=1e-6)


FIELDS: dict[str, dict[str, tuple[float, ...]]] = {
    "penalties": {"repetition_penalty": (1.3, 0.8), "frequency_penalty": (0.0, 0.3), "presence_penalty": (0.0, 0.5)},
    "top_n_sigma": {"top_n_sigma": (1.0, 2.0, 3.0)},
    "top_k": {"top_k": (10, 40, 300)},
    "typ_p": {"typical_p": (0.5, 0.9)},
    "top_p": {"top_p": (0.4, 0.9)},
    "min_p": {"min_p": (0.02, 0.2)},
    "xtc": {"xtc_probability": (1.0,), "xtc_threshold": (0.03, 0.2)},
    "temperature": {"temperature": (0.5, 1.0, 2.0), "dynatemp_range": (0.0, 0.4), "dynatemp_exponent": (1.0, 2.0)},
}


def removes_what_top_n_sigma_ruled_out(order: Sequence[str]) -> bool:
    """Whether llama.cpp's next sampler that counts its candidates sees none that are -inf.

    llama.cpp keeps what top-n-sigma rules out as candidates without a chance until a filter drops them. The entropy of
    the dynamic temperature counts them then, and typical_p's becomes NaN.
    """
    behind = order[order.index("top_n_sigma") + 1 :] if "top_n_sigma" in order else ()
    for name in behind:
        if name in {"min_p", "top_p"}:
            return True
        if name in {"typ_p", "temperature", "top_k"}:
            return False
    return True


def test_any_order_leaves_the_tokens_and_probabilities_of_llama_cpps_chain() -> None:
    draw = random.Random(5)
    llama_filter = LlamaFilter(SIZE)
    compared = 0
    for seed in range(250):
        used = draw.sample([name for name in SAMPLERS if name != "dry"], draw.randint(2, 8))
        if not removes_what_top_n_sigma_ruled_out(used):
            continue
        fields = {field: draw.choice(values) for name in used for field, values in FIELDS[name].items()}
        rest = [name for name in SAMPLERS if name not in used]
        parameters = SamplingParams(**{"temperature": 1.0, **fields}, samplers=(*used, *rest))  # type: ignore[arg-type]
        logits = random_logits(seed)
        tokens = [draw.choice([int(logits.argmax()), draw.randrange(SIZE)]) for _ in range(20)]
        penalties = make_penalties(replace(parameters, repeat_last_n=64), lambda _token: b"")
        for penalty in penalties:
            penalty.add(tokens, output=True)
        ids, relative = apply_in_order(logits, None, parameters, penalties, llama_filter)
        mine = dict(zip(ids.tolist(), relative.astype(np.float64).tolist(), strict=True))
        theirs = apply_llama(logits, [llama_samplers(parameters)[name]() for name in used], tokens)
        # Sums in float32 and in float64 may differ by the token at the border of each sampler.
        assert len(mine.keys() ^ theirs.keys()) <= len(used), (seed, used, fields)
        both = sorted(mine.keys() & theirs.keys())
        mean = sum(mine[token] - theirs[token] for token in both) / len(both)
        for token in both:
            assert mine[token] == pytest.approx(theirs[token] + mean, abs=2e-3, rel=2e-3), (seed, used, fields)
        compared += 1
    assert compared > 100


def draws_of(sampler: Any, rows: Sequence[Floats]) -> list[tuple[int, float]]:
    """Let llama.cpp's ``sampler`` draw a token of each of ``rows``.

    Return the tokens, each with a number that selects it, by inverse CDF in order of token id, among those it kept.
    """
    import llama_cpp

    drawn = []
    for logits in rows:
        data = np.empty(len(logits), _TOKEN_DATA)
        data["id"], data["logit"] = np.arange(len(logits)), logits
        array = llama_cpp.llama_token_data_array(
            data=ctypes.cast(data.ctypes.data, llama_cpp.llama_token_data_p),
            size=len(logits),
            selected=-1,
            sorted=False,
        )
        llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
        kept = data[: array.size]
        token = int(kept["id"][array.selected])
        llama_cpp.llama_sampler_accept(sampler, token)
        kept = np.sort(kept, order="id")
        shares = kept["p"].astype(np.float64)
        place = int(np.searchsorted(kept["id"], token))
        drawn.append((token, float((shares[:place].sum() + shares[place] / 2) / shares.sum())))
    llama_cpp.llama_sampler_free(sampler)
    return drawn


@pytest.mark.parametrize("scale", [0.5, 2.0, 4.0])
@pytest.mark.parametrize(
    "fields",
    [
        {"mirostat": 1, "mirostat_tau": 5.0, "mirostat_eta": 0.1},
        {"mirostat": 1, "mirostat_tau": 2.0, "mirostat_eta": 0.5},
        {"mirostat": 2, "mirostat_tau": 5.0, "mirostat_eta": 0.1},
        {"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.5},
        {"adaptive_target": 0.3, "adaptive_decay": 0.9},
        {"adaptive_target": 0.05, "adaptive_decay": 0.5},
        {"adaptive_target": 1.0, "adaptive_decay": 0.0},
    ],
    ids=str,
)
def test_mirostat_and_adaptive_p_draw_the_tokens_of_llama_cpp(fields: dict[str, Any], scale: float) -> None:
    """With numbers that select llama.cpp's tokens among those that it kept: other ones kept would give other tokens."""
    import llama_cpp as llama

    parameters = SamplingParams(temperature=1.0, **fields)
    # Later, the value has grown so far that llama.cpp's number of tokens overflows, and it keeps one.
    rows = [random_logits(seed, scale) for seed in range(100)]
    if parameters.adaptive_target is not None:
        sampler = llama.llama_sampler_init_adaptive_p(parameters.adaptive_target, parameters.adaptive_decay, 7)
        rows = [row[:40] for row in rows]
    elif parameters.mirostat == 1:
        sampler = llama.llama_sampler_init_mirostat(SIZE, 7, parameters.mirostat_tau, parameters.mirostat_eta, 100)
    else:
        sampler = llama.llama_sampler_init_mirostat_v2(7, parameters.mirostat_tau, parameters.mirostat_eta)
    drawn = draws_of(sampler, rows)
    feedback = Feedback(parameters, SIZE, None)
    mine = [feedback.draw(row - row.max(), number) for row, (_, number) in zip(rows, drawn, strict=True)]
    assert mine == [token for token, _ in drawn]
    assert len(set(mine)) > 20
