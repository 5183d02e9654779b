"""Rules that only the routes of TGI, llama-server, Ollama or operators have."""

from dataclasses import replace

from unit.router.http.rule_cases.case import GENERATE, INFILL, ROOT, STREAM, Case, tgi

from caravan_dialects.api.admin import rules as admin_rules
from caravan_dialects.api.limits import Limits
from caravan_dialects.api.llama_server import rules as llama_server_rules
from caravan_dialects.api.ollama import rules as ollama_rules
from caravan_dialects.api.tgi import rules as tgi_rules
from caravan_proto.messages.model import FillTokens
from caravan_testing.scripted_engine import MODEL

PREFIXES = "/admin/prefixes"

CASES = [
    Case(
        tgi_rules.best_of_disabled_error,
        GENERATE,
        tgi(best_of=2),
        None,
        "`best_of` != 1 is not allowed for this endpoint. Given: 2",
        limits=Limits(max_best_of=1),
    ),
    Case(
        tgi_rules.best_of_without_sampling_error,
        ROOT,
        tgi(best_of=2),
        None,
        "you must use sampling when `best_of` is > 1. Given: 2",
    ),
    Case(
        tgi_rules.best_of_with_seed_error,
        ROOT,
        tgi(best_of=2, top_k=2, seed=5),
        None,
        "`seed` must not be set when `best_of` > 1. Given: 5",
    ),
    Case(
        tgi_rules.best_of_streaming_error,
        STREAM,
        tgi(best_of=2),
        None,
        "`best_of` != 1 is not supported when streaming tokens. Given: 2",
    ),
    Case(
        tgi_rules.truncate_error,
        STREAM,
        tgi(truncate=0),
        None,
        "`truncate` must be strictly positive and less than 255. Given: 0",
    ),
    Case(
        tgi_rules.unknown_adapter_error,
        STREAM,
        tgi(adapter_id="x"),
        None,
        "`adapter_id` must be one of the adapters served: `pirate`. Given: 'x'",
    ),
    Case(
        llama_server_rules.infill_error,
        INFILL,
        {},
        None,
        "scripted cannot fill in the middle of a text: its vocabulary has no tokens for that",
    ),
    Case(
        llama_server_rules.too_many_extra_parts_error,
        INFILL,
        {"input_extra": [{"text": ""}] * 257},
        "input_extra",
        "`input_extra` may have at most 256 entries. Given: 257",
        model=replace(MODEL, fill=FillTokens(prefix=3, suffix=4, middle=5)),
    ),
    Case(
        ollama_rules.insert_error,
        "/api/generate",
        {"model": "any", "prompt": "x", "suffix": "y"},
        None,
        "scripted does not support insert: its vocabulary has no tokens for `suffix`",
    ),
    Case(
        ollama_rules.keep_alive_error,
        "/api/generate",
        {"model": "any", "prompt": "x", "keep_alive": "2 weeks"},
        None,
        '`keep_alive` must be seconds, or a duration such as "5m" or "1h30m"; negative to keep the model loaded. '
        "Given: '2 weeks'",
    ),
    Case(
        tgi_rules.prefill_details_stream_error,
        STREAM,
        tgi(decoder_input_details=True),
        None,
        "`decoder_input_details` == true is not supported when streaming tokens",
    ),
    Case(
        admin_rules.unknown_parameter_error,
        "/admin/prefixes?shrad=a",
        {},
        None,
        "the URL may have the parameter `shard` only. Given: 'shrad'",
        method="DELETE",
    ),
    Case(
        admin_rules.pin_source_error,
        PREFIXES,
        {"prompt": "a", "messages": []},
        None,
        "the body must have exactly one of `prompt` and `messages`. Given: prompt and messages",
    ),
    Case(
        admin_rules.pin_field_error,
        PREFIXES,
        {"prompt": "a", "tool_prompt": "b"},
        None,
        "`tool_prompt` goes with `messages` only. Given: 'b'",
    ),
    Case(
        admin_rules.short_pin_error,
        PREFIXES,
        {"prompt": "a" * 14},
        None,
        "a prefix that is pinned must have at least 16 tokens. Given: 15",
    ),
    Case(
        admin_rules.pin_limit_error,
        PREFIXES,
        {"prompt": "a" * 200},
        None,
        "all pinned prefixes together may take 200 bytes, half of the smallest shard's memory for saved "
        "prefixes (--cache-ram). With this one, they would take 201",
    ),
    Case(
        admin_rules.tenant_error,
        PREFIXES,
        {"prompt": "a", "tenant": "nobody"},
        None,
        "`tenant` must be the name of an API key. Given: 'nobody'",
    ),
    Case(
        admin_rules.adapter_error,
        "/v1/load_lora_adapter",
        {"lora_name": "a b", "lora_path": "a.gguf"},
        "lora_name",
        "lora_name must have 1 to 128 characters that are neither blank nor `=`. Given: 'a b'",
    ),
]
