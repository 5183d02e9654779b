"""Every metric: name, kind, labels, buckets and meaning. The exposition and the documentation are made from it."""

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """A metric. ``bounds``: upper bounds of the buckets of a histogram.

    ``labels`` is without `MODEL_LABEL`, which each metric ``of_models`` has too, as the last one.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    of_models: bool = True

    @property
    def all_labels(self) -> tuple[str, ...]:
        """All labels of a series, in their order."""
        return (*self.labels, MODEL_LABEL) if self.of_models else self.labels


@dataclass(frozen=True, slots=True)
class Alias:
    """Another name for the metric ``of``.

    ``labels``: the names of its labels there, without that of the model; fewer than the metric has: its series are
    summed; None: its own. ``model_label``: the label with the model. ``known_models_only``: without the series of
    requests whose model is not known. ``help``: "" for that of the metric. ``note``: what readers should know, for the
    documentation.
    """

    name: str
    of: str
    labels: tuple[str, ...] | None = None
    model_label: str = "model_name"
    known_models_only: bool = True
    help: str = ""
    note: str = ""


MODEL_LABEL = "model"

# The same buckets as TGI: 0.00015 to 145.6 s.
SECONDS = tuple(0.0001 * 1.5**power for power in range(1, 36))
# TGI's buckets, and more up to 28 minutes: requests with thousands of tokens take longer than 145.6 s.
REQUEST_SECONDS = tuple(0.0001 * 1.5**power for power in range(1, 42))
# Round values, so that the share of requests within a target such as 2 s is exact.
FIRST_TOKEN_SECONDS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.5),
    *(10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0, 300.0, 600.0),
)
# Fine where it matters: tens of microseconds for overhead, milliseconds between two tokens.
SHORT_SECONDS = (
    *(0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.0075),
    *(0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0),
)
# TGI has one bucket for each number up to its --speculate.
ACCEPTED = (*(float(count) for count in range(9)), 12.0, 16.0, 24.0, 32.0)
SIZES = tuple(float(2**power) for power in range(11))
# TGI has a hundred equal buckets up to its limits; these are fewer and hold for any model.
TOKENS = tuple(float(2**power) for power in range(18))

C, G, H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM

METRICS = (
    MetricSpec("tgi_request_count", C, "Generations requested"),
    MetricSpec("tgi_request_success", C, "Generations that ended with a finish reason"),
    MetricSpec(
        "tgi_request_failure",
        C,
        "Generations that failed: overloaded, rate_limited (limits of the API key), queue_timeout, deadline, "
        "validation, template (the chat template), incomplete, dropped (the client left), "
        "aborted (by DELETE), generation",
        ("err",),
    ),
    MetricSpec("tgi_request_duration", H, "Seconds from arrival to the last token", (), REQUEST_SECONDS),
    MetricSpec("tgi_request_validation_duration", H, "Seconds from arrival to the queue", (), REQUEST_SECONDS),
    MetricSpec("tgi_request_queue_duration", H, "Seconds in the queue", (), REQUEST_SECONDS),
    MetricSpec(
        "tgi_request_inference_duration", H, "Seconds from the first step to the last token", (), REQUEST_SECONDS
    ),
    MetricSpec(
        "tgi_request_mean_time_per_token_duration", H, "Seconds of inference per generated token", (), REQUEST_SECONDS
    ),
    MetricSpec(
        "caravan_request_prefill_seconds", H, "Seconds from the first step to the first token", (), REQUEST_SECONDS
    ),
    MetricSpec(
        "caravan_request_decode_seconds", H, "Seconds from the first token to the last token", (), REQUEST_SECONDS
    ),
    MetricSpec(
        "caravan_requests_finished_total",
        C,
        "Generations that ended with a finish reason: stop (end of the text or a stop string), length",
        ("finish_reason",),
    ),
    MetricSpec("caravan_generated_tokens_total", C, "Tokens that steps sampled"),
    MetricSpec("tgi_request_input_length", H, "Prompt tokens of a request", (), TOKENS),
    MetricSpec("tgi_request_max_new_tokens", H, "Tokens that a request may generate", (), TOKENS),
    MetricSpec(
        "tgi_request_skipped_tokens",
        H,
        "Draft tokens that a step accepted, for each sequence that got a token",
        (),
        ACCEPTED,
    ),
    MetricSpec("tgi_request_generated_tokens", H, "Tokens that a request generated", (), TOKENS),
    MetricSpec("tgi_queue_size", G, "Requests that wait for a shard"),
    MetricSpec("caravan_queue_oldest_seconds", G, "Time since the arrival of the oldest request that has not started"),
    MetricSpec("tgi_batch_current_size", G, "Running sequences on all shards of the model"),
    MetricSpec("tgi_batch_current_max_tokens", G, "KV cells of running sequences on all shards of the model"),
    MetricSpec("tgi_batch_max_total_tokens", G, "KV cells of all shards of the model"),
    MetricSpec("tgi_batch_next_size", H, "Requests that one step admitted", (), SIZES),
    MetricSpec("tgi_batch_inference_count", C, "Steps that were started", ("method",)),
    MetricSpec("tgi_batch_inference_success", C, "Steps that succeeded", ("method",)),
    MetricSpec("tgi_batch_inference_failure", C, "Steps that failed", ("method",)),
    MetricSpec("tgi_batch_inference_duration", H, "Seconds of a step on its shard", ("method",), SECONDS),
    MetricSpec("tgi_batch_forward_duration", H, "Seconds of a step's forward pass", ("method",), SECONDS),
    MetricSpec("tgi_batch_decode_duration", H, "Seconds of a step's sampling", ("method",), SECONDS),
    MetricSpec("tgi_batch_filter_duration", H, "Seconds to release finished sequences", ("method",), SECONDS),
    MetricSpec("tgi_batch_concat", C, "Prefills that joined a running batch", ("reason",)),
    MetricSpec(
        "caravan_time_to_first_token_seconds", H, "Time from arrival to the first token", (), FIRST_TOKEN_SECONDS
    ),
    MetricSpec(
        "caravan_inter_token_latency_seconds",
        H,
        "Time between two tokens of a request, of which tokens that come together have equal parts",
        (),
        SHORT_SECONDS,
    ),
    MetricSpec("caravan_batch_size", H, "Sequences that got a token in a step", ("shard", "method"), SIZES),
    MetricSpec("caravan_kv_cells_used", G, "KV cells of running sequences", ("shard",)),
    MetricSpec("caravan_kv_cells_cached", G, "KV cells of ended sequences, kept for shared prefixes", ("shard",)),
    MetricSpec("caravan_kv_cells", G, "KV cells that may be used", ("shard",)),
    MetricSpec("caravan_kv_usage_ratio", G, "Part of the KV cells of all shards that running sequences use, 0 to 1"),
    MetricSpec(
        "caravan_kv_cache_info",
        G,
        "Always 1; the labels: tokens of a block, blocks of all shards",
        ("block_size", "num_gpu_blocks"),
    ),
    MetricSpec(
        "caravan_lora_requests_info",
        G,
        "Seconds since 1970; the labels: adapters that run, that wait, and how many there are",
        ("running_lora_adapters", "waiting_lora_adapters", "max_lora"),
    ),
    MetricSpec("caravan_sequences_running", G, "Running sequences", ("shard",)),
    MetricSpec("caravan_step_duration_seconds", H, "Duration of a step on its shard", ("shard", "method"), SECONDS),
    MetricSpec("caravan_step_forward_seconds", H, "Time of a step's forward pass", ("shard", "method"), SECONDS),
    MetricSpec("caravan_step_sample_seconds", H, "Time of a step's sampling", ("shard", "method"), SHORT_SECONDS),
    MetricSpec(
        "caravan_step_overhead_seconds",
        H,
        "Time between the ends of two steps, less the forward pass: what serving costs",
        ("shard", "method"),
        SHORT_SECONDS,
    ),
    MetricSpec("caravan_prompt_tokens_total", C, "Prompt tokens of requests that started"),
    MetricSpec("caravan_prompt_cached_tokens_total", C, "Prompt tokens of requests that started, found in the cache"),
    MetricSpec(
        "caravan_prompt_computed_tokens_total",
        C,
        "Prompt tokens of requests that started, not found in the cache, by the reason",
        ("reason",),
    ),
    MetricSpec("caravan_request_cached_tokens", H, "Prompt tokens of a request found in the cache", (), TOKENS),
    MetricSpec("caravan_spec_decode_num_drafts_total", C, "Drafts that steps verified, by their source", ("source",)),
    MetricSpec("caravan_spec_decode_num_draft_tokens_total", C, "Tokens of those drafts", ("source",)),
    MetricSpec("caravan_spec_decode_num_accepted_tokens_total", C, "Draft tokens that outputs have", ("source",)),
    MetricSpec(
        "caravan_spec_decode_num_accepted_tokens_per_pos_total",
        C,
        "Draft tokens that outputs have, by their place in the draft, from 0 on",
        ("position",),
    ),
    MetricSpec(
        "caravan_requests_handed_over_total",
        C,
        "Requests that another router, which held a shard of the model, answered and counted",
    ),
    MetricSpec(
        "caravan_media_decode_seconds",
        H,
        "Time until an image or audio file was decoded, or found among those decoded before",
        ("kind",),
        REQUEST_SECONDS,
    ),
    MetricSpec(
        "caravan_media_refused_total",
        C,
        "Image and audio files that were refused: encoding (no base64), format, size, broken, time, memory, "
        "decoder (it died of the file)",
        ("reason",),
    ),
    MetricSpec(
        "caravan_request_preemptions_total",
        C,
        "Running requests that gave their cells to others: swap, recompute",
        ("how",),
    ),
    MetricSpec(
        "caravan_scheduler_faults_total",
        C,
        "Bugs that the scheduler has met: request (one request has failed), model (its scheduler has begun anew)",
        ("scope",),
    ),
    MetricSpec("caravan_tokens_recomputed_total", C, "Tokens computed again for requests that had lost their cells"),
    MetricSpec("caravan_prefix_fetched_bytes_total", C, "Saved prefixes that shards fetched from each other, in bytes"),
    MetricSpec("caravan_media_encodings_total", C, "Images and audio that shards encoded for prompts"),
    MetricSpec("caravan_media_encoding_seconds_total", C, "Time that this took, in seconds"),
    MetricSpec("caravan_failed_media_encodings_total", C, "Images and audio that a shard did not encode"),
    MetricSpec(
        "caravan_failed_prefix_fetches_total", C, "Fetches of saved prefixes that failed, or brought only a part"
    ),
    MetricSpec("caravan_sequences_swapped", G, "Waiting sequences whose cells are saved outside the cache"),
    MetricSpec("caravan_saved_bytes", G, "Size of prefixes that are saved outside the cache", ("shard", "tier")),
    MetricSpec("caravan_pinned_bytes", G, "Size of what is saved of pinned prefixes", ("shard",)),
    MetricSpec("caravan_shards_up", G, "Shards that the router holds"),
    MetricSpec("caravan_wanted_shards", G, "Shards that the load of this router needs to meet its targets"),
    MetricSpec(
        "caravan_shard_losses_total", C, "Shards given up because they died, could not be reached or made no progress"
    ),
)

# Metrics that belong to no model.
BUILD_INFO = MetricSpec(
    "caravan_build_info", G, "Always 1; the label has the router's version", ("version",), of_models=False
)
HTTP_REQUESTS = MetricSpec(
    "caravan_http_requests_total",
    C,
    "HTTP requests, except for health and metrics, by route (`none`: no such one) and status (499: the client left)",
    ("handler", "method", "status"),
    of_models=False,
)

# Names that the next version leaves out, of metrics whose names did not follow OpenMetrics: a counter ends in `_total`,
# nothing else does. No new name is an old one and `_total`: in OpenMetrics both would have the same name.
FORMER_NAMES = {
    "caravan_prefix_cache_query_tokens": "caravan_prompt_tokens_total",
    "caravan_prefix_cache_hit_tokens": "caravan_prompt_cached_tokens_total",
    "caravan_preemptions": "caravan_request_preemptions_total",
    "caravan_recomputed_tokens": "caravan_tokens_recomputed_total",
    "caravan_fetched_bytes": "caravan_prefix_fetched_bytes_total",
    "caravan_failed_fetches": "caravan_failed_prefix_fetches_total",
    "caravan_kv_cells_total": "caravan_kv_cells",
}
FORMER_ALIASES = tuple(
    Alias(former, name, model_label=MODEL_LABEL, known_models_only=False, help=f"Until 0.6: {name}")
    for former, name in FORMER_NAMES.items()
)
