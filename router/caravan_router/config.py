"""The router's flags and their limits. A flag that TGI has too has TGI's name."""

import ipaddress
import math
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from caravan_dialects.api.errors import RequestError
from caravan_dialects.api.limits import Limits
from caravan_dialects.api.openai.chat.template_kwargs import checked_kwargs
from caravan_dialects.conversations.store import StoreSettings
from caravan_proto.flags import flag
from caravan_proto.tls import MutualTls, TlsFiles
from caravan_router.engine.discovery import NamedSource, parse_source
from caravan_router.engine.link_config import LinkConfig
from caravan_router.engine.security import ShardTls
from caravan_router.tracing.settings import TraceSettings, read_settings
from caravan_scheduler.config import PrefillMode, SchedulerConfig

_NO_BUDGET = -1
_LIFE_S, _LIFE_IN_FILE_S = 3600.0, 30 * 24 * 3600.0


def _template_kwargs(text: str) -> dict[str, Any]:
    """Return the variables that ``text``, the flag's value, sets. Raises ValueError."""
    if not text:
        return {}
    try:
        return checked_kwargs(msgspec.json.decode(text, type=dict[str, Any]), "--chat-template-kwargs")
    except msgspec.DecodeError as error:
        raise ValueError(f"--chat-template-kwargs must be a JSON object: {error}. Given: {text[:200]!r}") from None
    except RequestError as error:
        raise ValueError(str(error)) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """The flags of ``caravan-router`` and ``caravan serve``. Raises ValueError if two fields contradict each other."""

    hostname: str = flag("127.0.0.1", "address to listen on; 0.0.0.0 for all interfaces")
    port: int = flag(3000, "TCP port to listen on; 0 picks a free one", "-p", low=0, high=65535)
    shard: tuple[str, ...] = flag(
        (),
        "where shards are: unix:/path, host:port, dns:name:port (every IP address of the name), file:path (one address "
        "per line) or k8s:namespace/service:port (the pods of a Service, by Kubernetes' API); repeatable",
    )
    shard_certfile: str | None = flag(
        None, "PEM file of the certificate chain to show to shards; with it, shards on TCP are spoken to over TLS only"
    )
    shard_keyfile: str | None = flag(None, "PEM file of its private key (default: in --shard-certfile)")
    shard_ca_certs: str | None = flag(
        None, "PEM file of authorities, one of which must have signed a shard's certificate"
    )
    shard_hostname: str = flag(
        "", "name that the certificate of every shard must have (default: the host of the shard's address)"
    )
    expected_model: tuple[str, ...] = flag(
        (),
        "name of a model that is sure to be served: its requests wait for its first shard; the first is the default "
        "(default: the first that joins); repeatable",
    )
    shard_refresh_s: float = flag(2.0, "seconds between two lookups of dns: and file: shards", low=0.05)

    max_concurrent_requests: int = flag(
        128, "most generations of a model that run or wait; more are answered 429", low=1
    )
    max_client_batch_size: int = flag(32, "most prompts in one /v1/completions request", low=1)
    max_prompt_bytes: int | None = flag(
        None, "most bytes of a prompt (default: 32 for each token that a prompt may have)", low=1
    )
    max_best_of: int = flag(16, "most candidates for one prompt: the limit of n and best_of", low=1)
    max_stop_sequences: int | None = flag(
        None, "most stop strings in one request (default: 64, but 4 on TGI's own routes, as in TGI)", low=0
    )
    max_top_n_tokens: int = flag(5, "most alternatives for each token", low=0)
    max_input_tokens: int | None = flag(
        None, "most tokens of a prompt (default: what one sequence holds on every shard)", low=1
    )
    max_total_tokens: int | None = flag(None, "most tokens of prompt and output together (default: likewise)", low=2)
    strict_fields: bool = flag(
        False,
        "refuse unknown fields of bodies, but on the routes of agents; else they are ignored, logged and listed in the "
        "header X-Caravan-Ignored",
    )
    payload_limit: int | None = flag(
        None,
        "most bytes of a request body, decompressed (default: 2000000, or 32 MiB where a model sees or hears)",
        low=1,
    )
    max_bodies_mb: int = flag(
        512,
        "most MiB that the bodies of all open requests take, decoded values included; one client may have as much as "
        "it leaves free; more is answered 503",
        low=1,
    )
    max_media: int = flag(8, "most pictures and sounds in one request", low=0)
    chat_template_kwargs: str = flag(
        "",
        'JSON object of variables for chat templates, such as {"enable_thinking": false}, for requests that do not set '
        "them in their own `chat_template_kwargs`",
    )
    reasoning_budget: int = flag(
        _NO_BUDGET,
        "most tokens of a thought, for requests that name no budget; 0: no thoughts; -1: no limit",
        low=_NO_BUDGET,
        high=2**31 - 1,
    )
    max_request_new_tokens: int | None = flag(
        None,
        "most new tokens of one request, all candidates together (default: max-best-of times those of one candidate)",
        low=1,
    )
    max_connections: int = flag(1000, "most open connections; more are answered 503 and closed", low=1)
    header_timeout_s: float = flag(
        20.0, "seconds for a whole request head to arrive, else the connection closes", low=0.1
    )
    body_timeout_s: float = flag(60.0, "seconds for a request body to arrive, else the answer is 408", low=0.1)
    slow_client_timeout_s: float = flag(30.0, "a client that reads nothing for this many seconds is cut off", low=0.1)
    queue_timeout_s: float | None = flag(
        None, "seconds that a request waits for its turn, else the answer is 429 (default: no limit)", low=0.1
    )
    api_keys_file: str | None = flag(None, "TOML file of API keys (see `caravan key`); default: no key is needed")
    ssl_certfile: str | None = flag(None, "PEM file of the certificate chain; with it the router serves HTTPS")
    ssl_keyfile: str | None = flag(None, "PEM file of the private key (default: in --ssl-certfile)")
    ssl_ca_certs: str | None = flag(
        None, "PEM file of authorities, one of which must have signed a client's certificate"
    )
    advertise_url: str = flag(
        "", "URL at which other routers reach this one, to hand requests over while they hold no shard of a model"
    )
    cors_allow_origin: tuple[str, ...] = flag((), "origin of pages that may call the API (default: any); repeatable")
    page: bool = flag(
        True, "show browsers a page at / to talk to the models and to watch the fleet", negation="--no-page"
    )

    prefill_mode: str = flag(
        "mixed",
        "mixed: steps carry prompt chunks and decoding sequences; pause: prefills run alone, as in TGI",
        choices=[mode.value for mode in PrefillMode],
    )
    target_itl_ms: float = flag(220.0, "mixed: longest time that a step with decoding sequences should take", low=1)
    waiting_served_ratio: float = flag(
        0.3, "pause: prefill when waiting requests >= this ratio x running ones; mixed: how much they weigh", low=0
    )
    max_waiting_tokens: int = flag(20, "pause: prefill after this many decode steps, whatever waits", low=0)
    max_batch_prefill_tokens: int = flag(4096, "most prompt tokens in one step", low=1)
    max_batch_total_tokens: int | None = flag(None, "most KV cells to use of one shard (default: all)", low=1)
    max_batch_size: int | None = flag(
        None, "most sequences that run on one shard (default: as many as it holds)", low=1
    )
    prefix_caching: bool = flag(
        True, "keep ended sequences in the cache for others to start from, until room is needed"
    )
    kv_watermark: float = flag(
        0.02, "part of a shard's cells left free at admission, for outputs longer than expected", low=0, high=0.9
    )
    priority_aging_s: float = flag(60.0, "seconds of waiting that raise a request's priority by one", low=0.001)

    speculate: int = flag(
        0,
        "most draft tokens of a sequence in one step, which change its text by rounding at most: from the request's "
        "prediction, its own prompt and output, its constraint, outputs of the same API key and salt, and the shard's "
        "draft model; 0 = no speculation, but caravan serve takes 8 with a draft model",
        low=0,
        high=64,
    )
    stream_interval_ms: int = flag(
        20,
        "a token that follows the last one within this time may be sent together with the next one, which saves "
        "processor time; 0: each at once",
        low=0,
        high=10_000,
    )
    shard_silence_s: float = flag(
        1.5,
        "a shard that reports nothing for so many seconds is given up, and its requests run elsewhere; so is one whose "
        "step takes longer than that and than 4 times the slowest of its last steps",
        low=0.3,
    )
    step_timeout_s: float = flag(
        60.0, "a shard whose step takes longer is given up, whatever its last steps took", low=1
    )
    max_request_losses: int = flag(
        2,
        "a request fails when so many shards in a row are lost while they compute the same tokens of it, because it "
        "may be what kills them; raise it where shards often end for other reasons",
        low=1,
    )
    shard_grace_s: float = flag(30.0, "seconds that requests wait for a shard while none is up", low=0)
    state_file: str | None = flag(
        None, "file that keeps responses and conversations when the router ends (default: they are kept in memory)"
    )
    state_space: int = flag(256, "most MiB of responses and conversations that are kept", low=1)
    state_life_s: float | None = flag(
        None,
        "seconds that a response or conversation is kept after its last use (default: 3600, with --state-file 30 days)",
        low=1,
    )
    record: str | None = flag(
        None, "file in which everything is recorded that the scheduler hears and decides, for `caravan replay`"
    )
    record_space: int = flag(256, "most MiB of the recording, of which the older half is in FILE.1", low=1)
    record_tokens: bool = flag(
        False, "record the tokens of prompts and outputs as they are, which can be read; else numbers stand for them"
    )
    handover: str | None = flag(
        None,
        "path of a Unix socket: a router that starts with the same path takes over the port of the one that runs, "
        "which then ends as with SIGTERM",
    )
    graceful_termination_timeout: float = flag(90.0, "seconds for running requests to end after SIGTERM", low=0)
    vllm_metrics: bool = flag(
        False,
        "expose queue, running requests, KV use and speculation under vLLM's names too, for tools that read them",
    )
    otlp_endpoint: str | None = flag(
        None,
        "URL of an OpenTelemetry collector that gets a trace of each request, such as http://localhost:4317 (default: "
        "OTEL_EXPORTER_OTLP_ENDPOINT); needs llama-caravan[otlp]",
    )
    otlp_service_name: str | None = flag(
        None, "name of this router in its traces (default: OTEL_SERVICE_NAME, else caravan-router)"
    )
    log_level: str = flag("info", "lowest level that is logged", choices=["debug", "info", "warning", "error"])
    json_output: bool = flag(False, "log JSON objects instead of text")

    def __post_init__(self) -> None:
        try:
            _ = self.sources
        except ValueError as error:
            raise ValueError(f"--shard {error}") from None
        _template_kwargs(self.chat_template_kwargs)
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ValueError(f"--otlp-endpoint must begin with http:// or https://. Given: {self.otlp_endpoint!r}")
        if self.advertise_url and not self.advertise_url.startswith(("http://", "https://")):
            raise ValueError(f"--advertise-url must begin with http:// or https://. Given: {self.advertise_url!r}")
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs):
            raise ValueError("--ssl-keyfile and --ssl-ca-certs need --ssl-certfile")
        if (self.shard_certfile is None) != (self.shard_ca_certs is None):
            raise ValueError("--shard-certfile and --shard-ca-certs need each other")
        if self.shard_certfile is None and (self.shard_keyfile or self.shard_hostname):
            raise ValueError("--shard-keyfile and --shard-hostname need --shard-certfile and --shard-ca-certs")
        if (
            self.max_input_tokens is not None
            and self.max_total_tokens is not None
            and self.max_input_tokens >= self.max_total_tokens
        ):
            raise ValueError(
                "--max-input-tokens must be < --max-total-tokens. "
                f"Given: {self.max_input_tokens} and {self.max_total_tokens}"
            )

    @property
    def scheduler(self) -> SchedulerConfig:
        """The settings of the scheduler."""
        return SchedulerConfig(
            mode=PrefillMode(self.prefill_mode),
            target_itl_s=self.target_itl_ms / 1000,
            max_batch_prefill_tokens=self.max_batch_prefill_tokens,
            max_batch_total_tokens=self.max_batch_total_tokens,
            max_batch_size=self.max_batch_size,
            prefix_caching=self.prefix_caching,
            watermark=self.kv_watermark,
            aging_s=self.priority_aging_s,
            waiting_served_ratio=self.waiting_served_ratio,
            max_waiting_tokens=self.max_waiting_tokens,
            no_shard_grace_s=self.shard_grace_s,
            max_fatal_losses=self.max_request_losses,
            max_losses=self.max_request_losses + 1,
            queue_timeout_s=math.inf if self.queue_timeout_s is None else self.queue_timeout_s,
        )

    @property
    def sources(self) -> tuple[NamedSource, ...]:
        """The places where addresses of shards are found."""
        return tuple(parse_source(text) for text in self.shard)

    @property
    def link(self) -> LinkConfig:
        """The settings of the links to shards. router_id is new with every start: older leases are not its own."""
        return LinkConfig(
            router_id=f"{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}",
            url=self.advertise_url,
            heartbeat_s=self.shard_silence_s / 3,
            silence_s=self.shard_silence_s,
            step_timeout_s=self.step_timeout_s,
            stream_interval_ms=self.stream_interval_ms,
            address_refresh_s=self.shard_refresh_s,
            wants_drafts=self.speculate > 0,
        )

    @property
    def store(self) -> StoreSettings:
        """Where responses and conversations are kept, and for how long."""
        file = None if self.state_file is None else Path(self.state_file)
        life_s = _LIFE_S if file is None else _LIFE_IN_FILE_S
        return StoreSettings(
            file=file,
            max_bytes=self.state_space << 20,
            life_s=life_s if self.state_life_s is None else self.state_life_s,
        )

    def read_shard_tls(self) -> ShardTls | None:
        """Read the files for TLS to shards, which blocks; None without them. Raises TlsFileError."""
        if self.shard_certfile is None:
            return None
        files = TlsFiles(
            prefix="--shard-",
            certfile=self.shard_certfile,
            keyfile=self.shard_keyfile,
            ca_certs=self.shard_ca_certs,
        )
        return ShardTls(MutualTls(files), self.shard_hostname)

    def read_trace_settings(self) -> TraceSettings | None:
        """Return how traces are sent, by the flags and OpenTelemetry's own variables; None if none are.

        Raises TracingError.
        """
        return read_settings(self.otlp_endpoint, self.otlp_service_name, os.environ)

    @property
    def tls(self) -> TlsFiles | None:
        """The files for HTTPS, or None for plain HTTP."""
        if self.ssl_certfile is None:
            return None
        return TlsFiles(
            prefix="--ssl-", certfile=self.ssl_certfile, keyfile=self.ssl_keyfile, ca_certs=self.ssl_ca_certs
        )

    @property
    def is_open_to_strangers(self) -> bool:
        """Whether other hosts reach the port, and need neither an API key nor a certificate."""
        if self.api_keys_file is not None or self.ssl_ca_certs is not None or self.hostname == "localhost":
            return False
        try:
            return not ipaddress.ip_address(self.hostname).is_loopback
        except ValueError:
            return True

    @property
    def limits(self) -> Limits:
        """The limits of the HTTP layer."""
        return Limits(
            max_concurrent_requests=self.max_concurrent_requests,
            max_client_batch_size=self.max_client_batch_size,
            max_prompt_bytes=self.max_prompt_bytes,
            max_best_of=self.max_best_of,
            max_stop_sequences=self.max_stop_sequences,
            strict_fields=self.strict_fields,
            max_top_n_tokens=self.max_top_n_tokens,
            max_input_tokens=self.max_input_tokens,
            max_total_tokens=self.max_total_tokens,
            max_request_new_tokens=self.max_request_new_tokens,
            max_draft_tokens=self.speculate,
            payload_limit=self.payload_limit,
            max_bodies_bytes=self.max_bodies_mb << 20,
            max_media=self.max_media,
            chat_template_kwargs=_template_kwargs(self.chat_template_kwargs),
            reasoning_budget=None if self.reasoning_budget == _NO_BUDGET else self.reasoning_budget,
            max_connections=self.max_connections,
            header_timeout_s=self.header_timeout_s,
            body_timeout_s=self.body_timeout_s,
            slow_client_timeout_s=self.slow_client_timeout_s,
        )
