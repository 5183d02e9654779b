"""Records what happens in the router. Everyone else calls a named method and knows no metric."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

from caravan_proto import __version__
from caravan_proto.messages.results import DraftCount, FinishReason
from caravan_router.engine.observer import Method, QueueUse, ShardUse
from caravan_router.metrics.exposition import PROMETHEUS, Family, Histogram, TextFormat, Value
from caravan_router.metrics.table import BUILD_INFO, FORMER_ALIASES, HTTP_REQUESTS, METRICS, Kind
from caravan_router.metrics.vllm import VLLM_ALIASES, VLLM_HTTP_REQUESTS
from caravan_scheduler.actions import Preemption, Start
from caravan_scheduler.config import JoinReason
from caravan_scheduler.core.request_metrics import Failure, RequestTimings
from caravan_scheduler.events import Stepped
from caravan_scheduler.prefix_keys import BLOCK_TOKENS

_STEPS_TOGETHER = 64
# How metrics name the end of a generation, in vLLM's words.
_FINISHED = {FinishReason.LENGTH: "length"}
_STOPPED = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepInstruments:
    """The instruments that a step of one shard and method changes, looked up once.

    Steps are noted first and observed ``_STEPS_TOGETHER`` at a time: between two forward passes, which empty the
    processor's caches, most of the cost of observing is that of fetching its code and data again.
    """

    counts: tuple[Value, ...]
    total: tuple[Histogram, ...]
    forward: tuple[Histogram, ...]
    sample: tuple[Histogram, ...]
    batch_size: Histogram
    skipped: Histogram
    overhead: Histogram
    generated: Value
    noted: list[tuple[Stepped, float]] = field(default_factory=list)

    def note(self, step: Stepped, overhead_s: float) -> None:
        self.noted.append((step, overhead_s))
        if len(self.noted) >= _STEPS_TOGETHER:
            self.observe()

    def observe(self) -> None:
        for count in self.counts:
            count.add(len(self.noted))
        self.generated.add(sum(len(step.tokens) for step, _ in self.noted))
        for step, overhead_s in self.noted:
            for histograms, seconds in (
                (self.total, step.seconds),
                (self.forward, step.forward_s),
                (self.sample, step.sample_s),
            ):
                for histogram in histograms:
                    histogram.observe(seconds)
            if step.drafts:
                tokens = Counter(sequence_id for sequence_id, _ in step.tokens)
                self.batch_size.observe(len(tokens))
                for got in tokens.values():
                    self.skipped.observe(got - 1)
            else:
                self.batch_size.observe(len(step.tokens))
                self.skipped.observe(0, len(step.tokens))
            self.overhead.observe(overhead_s)
        self.noted.clear()


class Metrics:
    """All metrics of the table for each model, and ``registry`` with prometheus_client's own about the process.

    The values of every label are a small fixed set, except those of ``model`` and of ``shard``, whose series are
    removed by `ModelMetrics.model_gone` and `ModelMetrics.shard_gone`. ``vllm_names``: expose vLLM's names too.
    """

    def __init__(self, *, vllm_names: bool = False) -> None:
        self._aliases = (*FORMER_ALIASES, *(VLLM_ALIASES if vllm_names else ()))
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        build = Family(BUILD_INFO)
        build.value(__version__).set(1)
        self._http = Family(HTTP_REQUESTS)
        self._http_of_vllm = Family(VLLM_HTTP_REQUESTS)
        self._of_no_model = (build, self._http, *((self._http_of_vllm,) if vllm_names else ()))
        self._families = {spec.name: Family(spec) for spec in METRICS}
        self._models: dict[str, ModelMetrics] = {}

    def of(self, model: str) -> "ModelMetrics":
        """Return the metrics of the model of this name; "" stands for requests whose model is not known."""
        found = self._models.get(model)
        if found is None:
            found = self._models[model] = ModelMetrics(self._families, model, lambda: self._forget(model))
        return found

    def http_request(self, handler: str, method: str, status: int) -> None:
        """An HTTP request has ended. ``handler``: the path of its route, with the names of what varies."""
        self._http.value(handler, method, str(status)).add()
        self._http_of_vllm.value(handler, method, f"{status // 100}xx").add()

    def _forget(self, model: str) -> None:
        del self._models[model]
        for family in self._families.values():
            family.forget(model, -1)

    async def render(self, form: TextFormat = PROMETHEUS) -> bytes:
        """Return all metrics in this format."""
        for model in self._models.values():
            model.refresh()
        ours = "".join(family.text(form) for family in (*self._families.values(), *self._of_no_model))
        ours += "".join(self._families[alias.of].alias(alias, form) for alias in self._aliases)
        # In a thread, since the process collector reads files.
        return ours.encode() + await asyncio.to_thread(form.encode, self.registry)


class ModelMetrics:
    """The metrics of one model."""

    def __init__(self, families: Mapping[str, Family], model: str, on_gone: Callable[[], None]) -> None:
        self._families = families
        self._model = model
        self._on_gone = on_gone
        for family in families.values():
            if not family.spec.labels:
                if family.spec.kind is Kind.HISTOGRAM:
                    family.histogram(model)
                else:
                    family.value(model)
        self._shards: dict[str, ShardUse] = {}
        self._queue = QueueUse(requests=0, swapped=0, oldest_s=0.0)
        # When requests that are not in the queue yet arrived, and the number of their generations.
        self._in_validation: dict[object, tuple[float, int]] = {}
        self._steps: dict[tuple[str, Method], _StepInstruments] = {}
        # Observed for every token, so looked up once.
        self._inter_token = self._histogram("caravan_inter_token_latency_seconds")
        for how in Preemption:
            self._value("caravan_request_preemptions_total", how.value)
        for reason in (_STOPPED, *_FINISHED.values()):
            self._value("caravan_requests_finished_total", reason)
        for failure in Failure:
            self._value("tgi_request_failure", failure.value)

    def _value(self, name: str, *labels: str) -> Value:
        return self._families[name].value(*labels, self._model)

    def _histogram(self, name: str, *labels: str) -> Histogram:
        return self._families[name].histogram(*labels, self._model)

    def _observe(self, name: str, amount: float, *labels: str) -> None:
        self._histogram(name, *labels).observe(amount)

    def refresh(self) -> None:
        """Observe the steps that are only noted so far, and set the gauges of the queue and of cells and adapters."""
        for instruments in self._steps.values():
            instruments.observe()
        requests, oldest_s, wanted = self._queue.requests, self._queue.oldest_s, self._queue.wanted_shards
        if not self._shards and self._in_validation:
            arrived_s, numbers = zip(*self._in_validation.values(), strict=True)
            requests += sum(numbers)
            oldest_s = max(oldest_s, time.monotonic() - min(arrived_s))
            wanted = max(wanted, 1.0)
        self._value("tgi_queue_size").set(requests)
        self._value("caravan_queue_oldest_seconds").set(oldest_s)
        self._value("caravan_wanted_shards").set(wanted)
        blocks = sum(use.total_cells for use in self._shards.values()) // BLOCK_TOKENS
        self._set_info("caravan_kv_cache_info", 1.0 if blocks else None, str(BLOCK_TOKENS), str(blocks))
        running = {name for use in self._shards.values() for name in use.adapters if name}
        self._set_info(
            "caravan_lora_requests_info",
            time.time() if self._queue.max_adapters else None,
            ",".join(sorted(running)),
            ",".join(sorted(self._queue.adapters - running - {""})),
            str(self._queue.max_adapters),
        )

    def _set_info(self, name: str, value: float | None, *labels: str) -> None:
        """Let this be the only series of the model; None: it has none."""
        self._families[name].forget(self._model, -1)
        if value is not None:
            self._value(name, *labels).set(value)

    # Requests, called by the HTTP layer.

    def request_arrived(self, generations: int = 1) -> None:
        self._value("tgi_request_count").add(generations)

    @contextmanager
    def validating(self, generations: int) -> Iterator[None]:
        """Count ``generations`` as waiting for the length of the block while no shard is up.

        They are not in the queue yet, because their prompts are still to be tokenized, which takes a shard.
        """
        key = object()
        self._in_validation[key] = (time.monotonic(), generations)
        try:
            yield
        finally:
            del self._in_validation[key]

    def request_validated(self, input_tokens: int, max_new_tokens: int) -> None:
        self._observe("tgi_request_input_length", input_tokens)
        self._observe("tgi_request_max_new_tokens", max_new_tokens)

    def request_failed(self, failure: Failure, generations: int = 1) -> None:
        self._value("tgi_request_failure", failure.value).add(generations)

    def request_succeeded(self, timings: RequestTimings, generated_tokens: int, finish: FinishReason) -> None:
        self._value("tgi_request_success").add()
        self._value("caravan_requests_finished_total", _FINISHED.get(finish, _STOPPED)).add()
        self._observe("tgi_request_duration", timings.total_s)
        self._observe("tgi_request_validation_duration", timings.validation_s)
        self._observe("tgi_request_queue_duration", timings.queue_s)
        self._observe("caravan_request_prefill_seconds", timings.prefill_s)
        self._observe("caravan_request_decode_seconds", timings.decode_s)
        self._observe("tgi_request_inference_duration", timings.inference_s)
        self._observe("tgi_request_mean_time_per_token_duration", timings.inference_s / max(1, generated_tokens))
        self._observe("tgi_request_generated_tokens", generated_tokens)

    def observe_first_token(self, since_arrival_s: float) -> None:
        self._observe("caravan_time_to_first_token_seconds", since_arrival_s)

    def observe_inter_token(self, gap_s: float) -> None:
        self._inter_token.observe(gap_s)

    # Steps, shards and the queue: the engine's observer.

    def step(self, step: Stepped, method: Method, overhead_s: float) -> None:
        instruments = self._steps.get((step.shard, method))
        if instruments is None:
            instruments = self._step_instruments(step.shard, method.value)
            self._steps[step.shard, method] = instruments
        instruments.note(step, overhead_s)
        for _, count in step.drafts:
            self._count_drafts(count)

    def _count_drafts(self, count: DraftCount) -> None:
        source = count.source.value
        self._value("caravan_spec_decode_num_drafts_total", source).add()
        self._value("caravan_spec_decode_num_draft_tokens_total", source).add(count.drafted)
        self._value("caravan_spec_decode_num_accepted_tokens_total", source).add(count.accepted)
        for position in range(count.accepted):
            self._value("caravan_spec_decode_num_accepted_tokens_per_pos_total", str(position)).add()

    def _step_instruments(self, shard: str, method: str) -> _StepInstruments:
        self._value("tgi_batch_inference_failure", method)
        return _StepInstruments(
            counts=(
                self._value("tgi_batch_inference_count", method),
                self._value("tgi_batch_inference_success", method),
            ),
            total=(
                self._histogram("tgi_batch_inference_duration", method),
                self._histogram("caravan_step_duration_seconds", shard, method),
            ),
            forward=(
                self._histogram("tgi_batch_forward_duration", method),
                self._histogram("caravan_step_forward_seconds", shard, method),
            ),
            sample=(
                self._histogram("tgi_batch_decode_duration", method),
                self._histogram("caravan_step_sample_seconds", shard, method),
            ),
            batch_size=self._histogram("caravan_batch_size", shard, method),
            skipped=self._histogram("tgi_request_skipped_tokens"),
            overhead=self._histogram("caravan_step_overhead_seconds", shard, method),
            generated=self._value("caravan_generated_tokens_total"),
        )

    def step_failed(self, method: Method) -> None:
        self._value("tgi_batch_inference_count", method.value).add()
        self._value("tgi_batch_inference_failure", method.value).add()

    def admitted(self, requests: int) -> None:
        self._observe("tgi_batch_next_size", requests)

    def queue(self, use: QueueUse) -> None:
        self._queue = use
        self._value("caravan_sequences_swapped").set(use.swapped)

    def started(self, start: Start) -> None:
        self._value("caravan_prompt_tokens_total").add(start.prompt_tokens)
        self._value("caravan_prompt_cached_tokens_total").add(start.cached_tokens)
        self._observe("caravan_request_cached_tokens", start.cached_tokens)
        for part in start.recomputed.parts:
            self._value("caravan_prompt_computed_tokens_total", part.reason.value).add(part.tokens)

    def resumed(self, computed_again: int) -> None:
        self._value("caravan_tokens_recomputed_total").add(computed_again)

    def fetched(self, size_bytes: int, *, complete: bool) -> None:
        if complete:
            self._value("caravan_prefix_fetched_bytes_total").add(size_bytes)
        else:
            self._value("caravan_failed_prefix_fetches_total").add()

    def encoded(self, seconds: float, *, done: bool) -> None:
        if not done:
            self._value("caravan_failed_media_encodings_total").add()
        elif seconds > 0:
            self._value("caravan_media_encodings_total").add()
            self._value("caravan_media_encoding_seconds_total").add(seconds)

    def media_decoded(self, kind: str, duration_s: float) -> None:
        """A file of a picture or a sound became a medium."""
        self._observe("caravan_media_decode_seconds", duration_s, kind)

    def media_refused(self, reason: str) -> None:
        """A file of a picture or a sound was refused."""
        self._value("caravan_media_refused_total", reason).add()

    def handed_over(self) -> None:
        """Another router answers a request."""
        self._value("caravan_requests_handed_over_total").add()

    def preempted(self, how: Preemption) -> None:
        self._value("caravan_request_preemptions_total", how.value).add()

    def faulted(self, *, rebuilt: bool) -> None:
        self._value("caravan_scheduler_faults_total", "model" if rebuilt else "request").add()

    def shard_use(self, use: ShardUse) -> None:
        self._value("caravan_kv_cells_used", use.shard).set(use.used_cells)
        self._value("caravan_kv_cells_cached", use.shard).set(use.cached_cells)
        self._value("caravan_kv_cells", use.shard).set(use.total_cells)
        self._value("caravan_sequences_running", use.shard).set(use.sequences)
        self._value("caravan_saved_bytes", use.shard, "memory").set(use.memory_bytes)
        self._value("caravan_saved_bytes", use.shard, "disk").set(use.disk_bytes)
        self._value("caravan_pinned_bytes", use.shard).set(use.pinned_bytes)
        self._shards[use.shard] = use
        self._sum_shards()

    def shard_lost(self) -> None:
        self._value("caravan_shard_losses_total").add()

    def shard_gone(self, shard: str) -> None:
        """Remove the series of a shard, so that shards with new addresses do not pile up."""
        for method in Method:
            if (instruments := self._steps.pop((shard, method), None)) is not None:
                instruments.observe()  # Some of its instruments count the steps of all shards.
        for family in self._families.values():
            if family.spec.labels[:1] == ("shard",):
                family.forget(shard, 0)
        self._shards.pop(shard, None)
        self._sum_shards()

    def model_gone(self) -> None:
        """Remove the series of the model. Its requests may end later: they count in new series that no page shows."""
        self._on_gone()
        self._families = {name: Family(family.spec) for name, family in self._families.items()}

    def _sum_shards(self) -> None:
        uses = self._shards.values()
        used, total = sum(use.used_cells for use in uses), sum(use.total_cells for use in uses)
        self._value("caravan_shards_up").set(len(uses))
        self._value("caravan_kv_usage_ratio").set(used / total if total else 0.0)
        self._value("tgi_batch_current_size").set(sum(use.sequences for use in uses))
        self._value("tgi_batch_current_max_tokens").set(used)
        self._value("tgi_batch_max_total_tokens").set(total)

    def joined(self, reason: JoinReason) -> None:
        self._value("tgi_batch_concat", reason.value).add()

    def filtered(self, duration_s: float) -> None:
        self._observe("tgi_batch_filter_duration", duration_s, Method.DECODE.value)
