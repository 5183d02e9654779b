"""The router's flags and their limits. A flag that TGI has too has TGI's name."""

import ipaddress
import math
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import msgspec

from caravan_dialects.api.errors import RequestError
from caravan_dialects.api.limits import Limits
from caravan_dialects.api.openai.chat.schema import Effort
from caravan_dialects.api.openai.chat.thinking import checked_kwargs
from caravan_dialects.bulk.store import BulkSettings
from caravan_dialects.conversations.store import StoreSettings
from caravan_dialects.tool_servers import NO_TOOL_SERVERS, ToolServers
from caravan_proto.flags import flag
from caravan_proto.telemetry import LogSettings
from caravan_proto.tls import MutualTls, TlsFiles
from caravan_router.accounting.accounts import AccountsSettings
from caravan_router.engine.discovery import NamedSource, parse_source
from caravan_router.engine.link_config import LinkConfig, ShardTls
from caravan_router.mcp.config import McpLimits, read_servers
from caravan_router.mcp.servers import McpServers
from caravan_router.tracing.settings import TraceSettings, read_settings
from caravan_scheduler.config import PrefillMode, SchedulerConfig

_NO_BUDGET = -1
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+")
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


def _is_token(text: str) -> bool:
    """Whether a header can carry it: clients send keys in one."""
    return text.isascii() and text.isprintable() and bool(text) and " " not in text


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """The flags of ``caravan-router`` and ``caravan serve``. Raises ValueError if two fields contradict each other."""

    hostname: str = flag("127.0.0.1", "address to listen on; 0.0.0.0 for all interfaces")
    port: int = flag(3000, "TCP port to listen on; 0 picks a free one", "-p", low=0, high=65535)
    shard: tuple[str, ...] = flag(
        (),
        "addresses of shards: unix:/path, host:port, dns:name:port (every IP address of the name), file:path (one "
        "address per line) or k8s:namespace/service:port (the pods of a Service, through the Kubernetes API); "
        "repeatable",
    )
    shard_certfile: str | None = flag(
        None, "PEM file of the certificate chain to present to shards; with it, TCP connections to shards use TLS only"
    )
    shard_keyfile: str | None = flag(None, "PEM file of its private key (default: in --shard-certfile)")
    shard_ca_certs: str | None = flag(
        None, "PEM file of certificate authorities; a shard's certificate must be signed by one of them"
    )
    shard_hostname: str = flag(
        "", "name that every shard's certificate must have (default: the host of the shard's address)"
    )
    expected_model: tuple[str, ...] = flag(
        (),
        "name of a model that will be served: requests for it wait for its first shard; the first one named is the "
        "default model (default: the first that joins); repeatable",
    )
    shard_refresh_s: float = flag(2.0, "seconds between lookups of dns: and file: shards", low=0.05)

    max_concurrent_requests: int = flag(
        128, "maximum number of generations per model, running or waiting; further ones get 429", low=1
    )
    max_client_batch_size: int = flag(32, "maximum number of prompts in one /v1/completions request", low=1)
    max_prompt_bytes: int | None = flag(
        None, "maximum size of a prompt in bytes (default: 32 for each token that a prompt may have)", low=1
    )
    max_best_of: int = flag(16, "maximum number of candidates per prompt: the limit of n and best_of", low=1)
    max_stop_sequences: int | None = flag(
        None, "maximum number of stop strings per request (default: 64, but 4 on TGI's own routes, as in TGI)", low=0
    )
    max_top_n_tokens: int = flag(5, "maximum number of alternatives per token", low=0)
    max_input_tokens: int | None = flag(
        None, "maximum number of prompt tokens (default: what one sequence holds on every shard)", low=1
    )
    max_total_tokens: int | None = flag(
        None,
        "maximum number of prompt and output tokens together (default: what one sequence holds on every shard)",
        low=2,
    )
    strict_fields: bool = flag(
        False,
        "refuse unknown fields in request bodies, except on the agent routes; when off, they are ignored, logged and "
        "listed in the X-Caravan-Ignored header",
    )
    payload_limit: int | None = flag(
        None,
        "maximum size of a request body in bytes, after decompression (default: 2000000, or 32 MiB if a model reads "
        "images or audio)",
        low=1,
    )
    max_bodies_mb: int = flag(
        512,
        "memory limit for the bodies of all open requests in MiB, including decoded values; one client may use as "
        "much as it leaves free; beyond the limit, requests get 503",
        low=1,
    )
    max_media: int = flag(8, "maximum number of images and audio clips per request", low=0)
    chat_template_kwargs: str = flag(
        "",
        'JSON object of chat template variables, such as {"enable_thinking": false}, for requests that do not set '
        "them in their own `chat_template_kwargs`",
    )
    reasoning_budget: int = flag(
        _NO_BUDGET,
        "maximum number of reasoning tokens for requests that set no budget; 0: no reasoning; -1: no limit",
        low=_NO_BUDGET,
        high=2**31 - 1,
    )
    reasoning_effort: str | None = flag(
        None,
        "reasoning effort of requests that name none; none switches off the reasoning that a request does not ask for "
        "(default: the chat template decides)",
        choices=get_args(Effort),
    )
    max_request_new_tokens: int | None = flag(
        None,
        "maximum number of new tokens per request, over all candidates (default: max-best-of times the limit of one "
        "candidate)",
        low=1,
    )
    max_connections: int = flag(1000, "maximum number of open connections; further ones get 503 and are closed", low=1)
    header_timeout_s: float = flag(
        20.0, "seconds for a complete request head to arrive, after which the connection is closed", low=0.1
    )
    body_timeout_s: float = flag(
        60.0, "seconds for a request body to arrive, after which the request gets 408", low=0.1
    )
    slow_client_timeout_s: float = flag(
        30.0, "seconds after which a client that reads nothing is disconnected", low=0.1
    )
    queue_timeout_s: float | None = flag(
        None, "maximum seconds that a request waits in the queue, after which it gets 429 (default: no limit)", low=0.1
    )
    api_keys_file: str | None = flag(None, "TOML file of API keys (see `caravan key`); without it, no key is needed")
    api_key: str | None = flag(
        None,
        "the only API key, an operator's; lists of processes show it, so prefer CARAVAN_API_KEY",
        secret=True,
    )
    ssl_certfile: str | None = flag(None, "PEM file of the certificate chain; with it the router serves HTTPS")
    ssl_keyfile: str | None = flag(None, "PEM file of the private key (default: in --ssl-certfile)")
    ssl_ca_certs: str | None = flag(
        None, "PEM file of certificate authorities; a client's certificate must be signed by one of them"
    )
    root_path: str = flag(
        "",
        "path under which a proxy serves this router, such as /caravan, whether it strips it or not",
        "--api-prefix",
    )
    advertise_url: str = flag(
        "",
        "URL at which other routers reach this one; they forward requests to it while they hold no shard of the model",
    )
    cors_allow_origin: tuple[str, ...] = flag(
        (), "origin of web pages that may call the API (default: any); repeatable"
    )
    trusted_proxies: tuple[str, ...] = flag(
        (),
        "IP address or network (10.0.0.0/8) of a gateway whose headers x-llm-d-inference-fairness-id and the like are "
        "honoured; repeatable",
    )
    websockets: bool = flag(
        True,
        "let clients ask for responses over WebSocket; when off, they get status 426 and use HTTP",
        negation="--no-websockets",
    )
    page: bool = flag(
        True, "serve browsers a page at / for chatting with the models and watching the fleet", negation="--no-page"
    )

    prefill_mode: str = flag(
        "mixed",
        "mixed: steps combine prompt chunks and decoding sequences; pause: prefills run alone, as in TGI",
        choices=[mode.value for mode in PrefillMode],
    )
    target_itl_ms: float = flag(
        220.0, "mixed: how long a step with decoding sequences should take at most, in milliseconds", low=1
    )
    target_ttft_ms: float = flag(
        2000.0,
        "how long a request should wait for its first token at most, in milliseconds: for the number of shards that "
        "`caravan_wanted_shards` says",
        low=1,
    )
    target_kv_use: float = flag(
        0.8, "for the same number: part of the KV cells that running sequences should use at most", low=0.01, high=1
    )
    shard_start_s: float = flag(
        120.0, "for the same number: seconds until a new shard serves, for whose load it is meant", low=0
    )
    waiting_served_ratio: float = flag(
        0.3,
        "pause: prefill when waiting requests >= this ratio x running ones; mixed: weight of waiting prompts against "
        "running streams",
        low=0,
    )
    max_waiting_tokens: int = flag(20, "pause: prefill after this many decode steps, however few requests wait", low=0)
    max_batch_prefill_tokens: int = flag(4096, "maximum number of prompt tokens per step", low=1)
    max_batch_total_tokens: int | None = flag(
        None, "maximum number of KV cells to use on one shard (default: all)", low=1
    )
    max_batch_size: int | None = flag(
        None, "maximum number of sequences running on one shard (default: as many as it holds)", low=1
    )
    prefix_caching: bool = flag(
        True, "keep finished sequences in the cache, for prompts with the same prefix, until their room is needed"
    )
    kv_watermark: float = flag(
        0.02, "fraction of a shard's cells kept free at admission, for outputs longer than expected", low=0, high=0.9
    )
    priority_aging_s: float = flag(60.0, "seconds of waiting after which a request's priority rises by one", low=0.001)

    speculate: int = flag(
        0,
        "maximum number of draft tokens per sequence and step, from the request's prediction, its prompt and output, "
        "its constraint, outputs of the same API key and salt, and the shard's draft model; drafts change a text by "
        "rounding at most; 0: no speculative decoding, but caravan serve uses 8 with a draft model",
        low=0,
        high=64,
    )
    stream_interval_ms: int = flag(
        20,
        "a token that follows the previous one within this time may be sent together with the next one, which saves "
        "CPU time; 0: send each token at once",
        low=0,
        high=10_000,
    )
    shard_silence_s: float = flag(
        1.5,
        "seconds without a report after which a shard counts as lost and its requests run elsewhere; a shard also "
        "counts as lost if a step takes longer than this and than 4 times the slowest of its last steps",
        low=0.3,
    )
    step_timeout_s: float = flag(
        60.0,
        "seconds after which a shard whose step has not ended counts as lost, however long its last steps took",
        low=1,
    )
    max_request_losses: int = flag(
        2,
        "a request fails after this many shards in a row were lost while computing the same tokens of it, because it "
        "may be what kills them; raise it where shards often end for other reasons",
        low=1,
    )
    shard_grace_s: float = flag(30.0, "seconds that requests wait for a shard while none is up", low=0)
    state_file: str | None = flag(
        None, "file in which responses and conversations outlive the router (default: they are kept in memory only)"
    )
    state_url: str | None = flag(
        None,
        "URL of a PostgreSQL database that several routers may share, in place of --state-file: "
        "postgresql://user:password@host/name; needs llama-caravan[postgresql]",
        secret=True,
    )
    usage_file: str | None = flag(
        None,
        "SQLite file that counts the tokens of each API key (default: beside --state-file; without, in memory only)",
    )
    audit_log: str | None = flag(
        None, "file to which a line for each ended request is appended, for `caravan audit` (default: none)"
    )
    state_space: int = flag(256, "maximum size of stored responses and conversations in MiB", low=1)
    state_life_s: float | None = flag(
        None,
        "seconds that a response or conversation is kept after its last use (default: 3600, or 30 days with "
        "--state-file or --state-url)",
        low=1,
    )
    max_background: int = flag(
        16,
        "maximum number of responses per API key that are generated in the background, running or waiting; further "
        "ones get 429",
        low=0,
    )
    background_life_s: float = flag(
        28_800.0,
        "seconds after which a response in the background ends with what it has; its events are kept as long after its "
        "end",
        low=1,
    )
    mcp_config: str | None = flag(
        None,
        'JSON file of MCP servers ({"mcpServers": {"NAME": {"command": ..., "args": [...]} or {"url": ...}}}) whose '
        "tools responses may call; needs llama-caravan[mcp]",
    )
    mcp_max_calls: int = flag(32, "maximum number of calls to MCP servers for one response", low=0)
    mcp_timeout_s: float = flag(60.0, "seconds for each call to an MCP server, and for its list of tools", low=0.1)
    mcp_max_result_bytes: int = flag(
        65_536, "maximum size of what an MCP server returns for a call, as text in bytes", low=1, high=8 << 20
    )
    batch_concurrency: int = flag(
        32, "maximum number of requests of batches that run or wait at a time, of all batches together", low=1
    )
    file_space: int = flag(
        1024,
        "maximum size of uploaded files and of the results of batches in MiB, kept beside --state-file, in the "
        "database or until the router ends; one API key may use as much as it leaves free",
        low=1,
    )
    file_life_s: float = flag(2_592_000.0, "seconds that a file is kept which does not name a time itself", low=1)
    record: str | None = flag(
        None, "file to which every event and decision of the scheduler is recorded, for `caravan replay`"
    )
    record_space: int = flag(256, "size in MiB at which the recording ends", low=1)
    record_tokens: bool = flag(
        False,
        "record prompt and output tokens as they are, so that texts are readable; when off, numbers stand for them",
    )
    handover: str | None = flag(
        None,
        "path of a Unix socket: a router started with the same path takes over the port of the running one, which "
        "then shuts down as after SIGTERM",
    )
    graceful_termination_timeout: float = flag(90.0, "seconds for running requests to finish after SIGTERM", low=0)
    vllm_metrics: bool = flag(
        False,
        "also expose metrics under the names that they have in vLLM",
    )
    metrics_port: int | None = flag(
        None, "TCP port of /metrics, over HTTP; 0 picks a free one [as --port]", low=0, high=65535
    )
    metrics_key: str | None = flag(None, "bearer token that /metrics asks for (default: metrics are open)", secret=True)
    otlp_endpoint: str | None = flag(
        None,
        "URL of an OpenTelemetry collector that receives a trace of each request, such as http://localhost:4317 "
        "(default: OTEL_EXPORTER_OTLP_ENDPOINT); needs llama-caravan[otlp]",
    )
    otlp_service_name: str | None = flag(
        None, "name of this router in its traces (default: OTEL_SERVICE_NAME, else caravan-router)"
    )
    log_level: str = flag("info", "minimum level to log", choices=["debug", "info", "warning", "error"])
    json_output: bool = flag(False, "log JSON objects instead of text")
    log_file: str | None = flag(None, "file to append the log to (default: standard error); logrotate may move it")
    access_log: bool = flag(True, "log a line for each request", negation="--no-access-log")

    def __post_init__(self) -> None:
        try:
            _ = self.sources
        except ValueError as error:
            raise ValueError(f"--shard {error}") from None
        template_kwargs = _template_kwargs(self.chat_template_kwargs)
        if self.reasoning_effort is not None and "reasoning_effort" in template_kwargs:
            raise ValueError("--reasoning-effort and `reasoning_effort` in --chat-template-kwargs exclude each other")
        try:
            _ = self.proxies
        except ValueError as error:
            raise ValueError(f"--trusted-proxies: {error}") from None
        if self.api_key is not None and (self.api_keys_file is not None or not _is_token(self.api_key)):
            raise ValueError(
                "--api-key and --api-keys-file exclude each other"
                if self.api_keys_file is not None
                else "--api-key must have printable characters of ASCII without spaces"
            )
        if self.state_url is not None and (
            self.state_file is not None or not self.state_url.startswith(("postgresql://", "postgres://"))
        ):
            raise ValueError(
                "--state-file and --state-url exclude each other"
                if self.state_file is not None
                else "--state-url must begin with postgresql://"
            )
        if self.metrics_key is not None and not _is_token(self.metrics_key):
            raise ValueError("--metrics-key must have printable characters of ASCII without spaces")
        if self.root_path and not _ROOT_PATH.fullmatch(self.root_path):
            raise ValueError(
                "--root-path must begin with a slash, end with none, and have letters, digits or ._~- between: "
                f"such as /caravan. Given: {self.root_path!r}"
            )
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
            target_ttft_s=self.target_ttft_ms / 1000,
            target_cell_share=self.target_kv_use,
            shard_start_s=self.shard_start_s,
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
    def proxies(self) -> "tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]":
        """The networks of trusted gateways."""
        return tuple(ipaddress.ip_network(text) for text in self.trusted_proxies)

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
        place = self.state_url if self.state_file is None else Path(self.state_file)
        life_s = _LIFE_S if place is None else _LIFE_IN_FILE_S
        return StoreSettings(
            place=place,
            max_bytes=self.state_space << 20,
            life_s=life_s if self.state_life_s is None else self.state_life_s,
            job_life_s=self.background_life_s,
        )

    @property
    def accounts(self) -> AccountsSettings:
        """Where usage is counted and requests are listed."""
        beside = None if self.state_file is None else f"{self.state_file}-usage"
        file = self.usage_file or beside
        return AccountsSettings(
            file=None if file is None else Path(file),
            audit_log=None if self.audit_log is None else Path(self.audit_log),
        )

    @property
    def bulk(self) -> BulkSettings:
        """Where files and batches are kept, and for how long."""
        place = self.state_url if self.state_file is None else Path(f"{self.state_file}-files")
        return BulkSettings(place=place, max_bytes=self.file_space << 20, life_s=self.file_life_s)

    def read_mcp_servers(self) -> ToolServers:
        """Read the file of MCP servers, which blocks. Raises McpConfigError."""
        if self.mcp_config is None:
            return NO_TOOL_SERVERS
        limits = McpLimits(
            max_calls=self.mcp_max_calls,
            call_timeout_s=self.mcp_timeout_s,
            max_result_bytes=self.mcp_max_result_bytes,
        )
        return McpServers(read_servers(Path(self.mcp_config)), limits)

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
    def needs_key(self) -> bool:
        """Whether requests need an API key."""
        return self.api_keys_file is not None or self.api_key is not None

    @property
    def logging(self) -> LogSettings:
        """What is logged, and where to."""
        return LogSettings(
            level=self.log_level, json_output=self.json_output, file=self.log_file, access=self.access_log
        )

    @property
    def is_open_to_strangers(self) -> bool:
        """Whether other hosts reach the port, and need neither an API key nor a certificate."""
        if self.needs_key or self.ssl_ca_certs is not None or self.hostname == "localhost":
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
            websockets=self.websockets,
            strict_fields=self.strict_fields,
            batch_concurrency=self.batch_concurrency,
            max_top_n_tokens=self.max_top_n_tokens,
            max_input_tokens=self.max_input_tokens,
            max_total_tokens=self.max_total_tokens,
            max_request_new_tokens=self.max_request_new_tokens,
            max_draft_tokens=self.speculate,
            payload_limit=self.payload_limit,
            max_bodies_bytes=self.max_bodies_mb << 20,
            max_media=self.max_media,
            max_background=self.max_background,
            background_life_s=self.background_life_s,
            chat_template_kwargs=_template_kwargs(self.chat_template_kwargs),
            reasoning_budget=None if self.reasoning_budget == _NO_BUDGET else self.reasoning_budget,
            reasoning_effort=self.reasoning_effort,
            max_connections=self.max_connections,
            header_timeout_s=self.header_timeout_s,
            body_timeout_s=self.body_timeout_s,
            slow_client_timeout_s=self.slow_client_timeout_s,
        )
