"""vLLM's names, for tools that balance, scale and show vLLM servers: each has vLLM's meaning, or is absent."""

from caravan_router.metrics.table import HTTP_REQUESTS, Alias, Kind, MetricSpec

_ACCEPTED = "at the start of a request, not at its end"

VLLM_ALIASES = (
    Alias("vllm:num_requests_waiting", "tgi_queue_size"),
    Alias("vllm:num_requests_running", "tgi_batch_current_size"),
    Alias("vllm:kv_cache_usage_perc", "caravan_kv_usage_ratio"),
    Alias("vllm:gpu_cache_usage_perc", "caravan_kv_usage_ratio", note="now `kv_cache_usage_perc`"),
    Alias(
        "vllm:cache_config_info",
        "caravan_kv_cache_info",
        note="blocks of saved prefixes",
    ),
    Alias("vllm:lora_requests_info", "caravan_lora_requests_info", note="`max_lora`: those that are loaded"),
    Alias("vllm:prompt_tokens_total", "caravan_prompt_tokens_total", note="at a request's first step"),
    Alias("vllm:generation_tokens_total", "caravan_generated_tokens_total"),
    Alias("vllm:prefix_cache_queries_total", "caravan_prompt_tokens_total"),
    Alias("vllm:prefix_cache_hits_total", "caravan_prompt_cached_tokens_total", note="hits of all tiers"),
    Alias("vllm:num_preemptions_total", "caravan_request_preemptions_total", ()),
    Alias(
        "vllm:request_success_total",
        "caravan_requests_finished_total",
        ("finished_reason",),
        note="without `abort` and `error`: `tgi_request_failure`",
    ),
    Alias("vllm:time_to_first_token_seconds", "caravan_time_to_first_token_seconds"),
    Alias("vllm:inter_token_latency_seconds", "caravan_inter_token_latency_seconds"),
    Alias("vllm:e2e_request_latency_seconds", "tgi_request_duration"),
    Alias("vllm:request_queue_time_seconds", "tgi_request_queue_duration"),
    Alias("vllm:request_inference_time_seconds", "tgi_request_inference_duration"),
    Alias("vllm:request_prefill_time_seconds", "caravan_request_prefill_seconds"),
    Alias("vllm:request_decode_time_seconds", "caravan_request_decode_seconds"),
    Alias("vllm:request_prompt_tokens", "tgi_request_input_length", note=_ACCEPTED),
    Alias("vllm:request_generation_tokens", "tgi_request_generated_tokens"),
    Alias("vllm:request_params_max_tokens", "tgi_request_max_new_tokens", note=_ACCEPTED),
    Alias("vllm:spec_decode_num_drafts_total", "caravan_spec_decode_num_drafts_total", ()),
    Alias("vllm:spec_decode_num_draft_tokens_total", "caravan_spec_decode_num_draft_tokens_total", ()),
    Alias("vllm:spec_decode_num_accepted_tokens_total", "caravan_spec_decode_num_accepted_tokens_total", ()),
    Alias(
        "vllm:spec_decode_num_accepted_tokens_per_pos_total", "caravan_spec_decode_num_accepted_tokens_per_pos_total"
    ),
)

# Of prometheus-fastapi-instrumentator, which vLLM uses. It groups statuses, as in 2xx.
VLLM_HTTP_REQUESTS = MetricSpec(
    "http_requests_total", Kind.COUNTER, HTTP_REQUESTS.help, HTTP_REQUESTS.labels, of_models=False
)

# Why names of vLLM's that begin so are not exposed.
VLLM_ABSENT = {
    "vllm:request_max_num_generation_tokens": "candidates of `n` count alone: `request_generation_tokens`",
    "vllm:request_params_n": "candidates of `n` count alone",
    "vllm:request_time_per_output_token_seconds": "`tgi_request_mean_time_per_token_duration` includes the prefill",
    "vllm:time_per_output_token_seconds": "now `inter_token_latency_seconds`",
    "vllm:iteration_tokens_total": "per shard: `caravan_batch_size`",
    "vllm:num_requests_swapped": "no longer vLLM's: `caravan_sequences_swapped`",
    "vllm:external_prefix_cache": "all tiers are one cache: `prefix_cache_hits_total`",
    "vllm:cpu_cache_usage_perc": "no longer vLLM's: `caravan_saved_bytes`",
    "vllm:mm_cache": "hits are not counted: `caravan_media_encodings_total`",
}
