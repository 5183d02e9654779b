"""Rules that only the routes of TGI, llama-server, Ollama or operators have."""

from dataclasses import replace

from unit.router.http.rule_cases.case import GENERATE, INFILL, LLAMA, OLLAMA, ROOT, STREAM, Case, tgi

from caravan_router.core.engine import FillTokens
from caravan_router.http.admin import rules as admin_rules
from caravan_router.http.limits import Limits
from caravan_router.http.llama_server import rules as llama_server_rules
from caravan_router.http.ollama import rules as ollama_rules
from caravan_router.http.tgi import rules as tgi_rules
from caravan_testing.scripted_engine import MODEL

CASES = [
    Case(
        tgi_rules.BestOfDisabledError,
        GENERATE,
        tgi(best_of=2),
        None,
        "`best_of` != 1 is not allowed for this endpoint. Given: 2",
        limits=Limits(max_best_of=1),
    ),
    Case(
        tgi_rules.BestOfWithoutSamplingError,
        ROOT,
        tgi(best_of=2),
        None,
        "you must use sampling when `best_of` is > 1. Given: 2",
    ),
    Case(
        tgi_rules.BestOfWithSeedError,
        ROOT,
        tgi(best_of=2, top_k=2, seed=5),
        None,
        "`seed` must not be set when `best_of` > 1. Given: 5",
    ),
    Case(
        tgi_rules.BestOfStreamingError,
        STREAM,
        tgi(best_of=2),
        None,
        "`best_of` != 1 is not supported when streaming tokens. Given: 2",
    ),
    Case(
        tgi_rules.TruncateError,
        STREAM,
        tgi(truncate=0),
        None,
        "`truncate` must be strictly positive and less than 255. Given: 0",
    ),
    Case(
        tgi_rules.UnknownAdapterError,
        STREAM,
        tgi(adapter_id="x"),
        None,
        "`adapter_id` must be one of the adapters served: `pirate`. Given: 'x'",
    ),
    Case(
        llama_server_rules.SamplerError,
        LLAMA,
        {"samplers": ["y"]},
        "samplers",
        "`samplers` must be among penalties, dry, top_n_sigma, top_k, typ_p, top_p, min_p, xtc, temperature, infill. "
        "Given: 'y'",
    ),
    Case(
        llama_server_rules.InfillError,
        INFILL,
        {},
        None,
        "scripted cannot fill in: its vocabulary has no tokens for that",
    ),
    Case(
        llama_server_rules.TooManyExtraPartsError,
        INFILL,
        {"input_extra": [{"text": ""}] * 257},
        "input_extra",
        "`input_extra` may have at most 256 entries. Given: 257",
        model=replace(MODEL, fill=FillTokens(prefix=3, suffix=4, middle=5)),
    ),
    Case(
        ollama_rules.InsertError,
        "/api/generate",
        {"model": "any", "prompt": "x", "suffix": "y"},
        None,
        "scripted does not support insert: its vocabulary has no tokens for `suffix`",
    ),
    Case(
        tgi_rules.PrefillDetailsStreamError,
        STREAM,
        tgi(decoder_input_details=True),
        None,
        "`decoder_input_details` == true is not supported when streaming tokens",
    ),
    Case(
        ollama_rules.ImagesError,
        OLLAMA,
        {"images": ["a"]},
        None,
        "`images` is not supported: the model reads text only. Given: 1 images",
    ),
    Case(
        admin_rules.UnknownParameterError,
        "/admin/prefixes?shrad=a",
        {},
        None,
        "the URL may have the parameter `shard` only. Given: 'shrad'",
        method="DELETE",
    ),
]
