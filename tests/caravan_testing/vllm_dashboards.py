"""The queries of the Grafana dashboards that vLLM publishes, and what AIPerf reads of a server's metrics."""

from caravan_router.metrics.vllm import VLLM_ABSENT

_RANGE = "[1m]"
_QUANTILES = ("0.5", "0.9", "0.95", "0.99")


def _latency(name: str, selector: str) -> dict[str, str]:
    """Return the queries of a panel with quantiles and the mean of a histogram."""
    quantiles = {
        f"{name} p{quantile}": f"histogram_quantile({quantile}, sum by(le) (rate({name}_bucket{selector}{_RANGE})))"
        for quantile in _QUANTILES
    }
    return quantiles | {f"{name} mean": f"rate({name}_sum{selector}{_RANGE}) / rate({name}_count{selector}{_RANGE})"}


def vllm_queries(model: str) -> dict[str, str]:
    """Return the queries of ``examples/observability/prometheus_grafana/grafana.json`` by what they show."""
    selector = f'{{model_name="{model}"}}'
    latencies = ("e2e_request_latency_seconds", "time_to_first_token_seconds", "inter_token_latency_seconds")
    queries = {key: query for name in latencies for key, query in _latency(f"vllm:{name}", selector).items()}
    for name in ("prompt_tokens_total", "generation_tokens_total"):
        queries[name] = f"rate(vllm:{name}{selector}{_RANGE})"
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        queries[name] = f"vllm:{name}{selector}"
    for name in ("request_prompt_tokens", "request_generation_tokens"):
        queries[name] = f"sum by(le) (increase(vllm:{name}_bucket{selector}{_RANGE}))"
    queries["request_success_total"] = (
        f"sum by(finished_reason) (increase(vllm:request_success_total{selector}{_RANGE}))"
    )
    for name in ("request_queue_time", "request_prefill_time", "request_decode_time"):
        queries[name] = f"rate(vllm:{name}_seconds_sum{selector}{_RANGE})"
    queries["request_max_num_generation_tokens"] = f"rate(vllm:request_max_num_generation_tokens_sum{selector}{_RANGE})"
    return queries


def aiperf_queries(model: str) -> dict[str, str]:
    """Return a query for each metric that AIPerf 0.13 reads, by its name there."""
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cpu_cache_usage_perc")
    counters = (
        *("prefix_cache_hits", "prefix_cache_queries", "external_prefix_cache_hits", "external_prefix_cache_queries"),
        *("num_preemptions", "prompt_tokens", "generation_tokens", "request_success"),
    )
    histograms = ("e2e_request_latency_seconds", "time_to_first_token_seconds")
    samples = (*gauges, *(f"{name}_total" for name in counters), *(f"{name}_count" for name in histograms))
    return {name: f'vllm:{name}{{model_name="{model}"}}' for name in samples}


def says_why_not(query: str) -> bool:
    """Whether the table of names says why nothing answers this query of one metric."""
    return any(name in query for name in VLLM_ABSENT)
