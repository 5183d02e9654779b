"""The shard's flags and their limits. A flag that llama-server has too has llama-server's name."""

import ipaddress
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from caravan_proto.flags import flag
from caravan_proto.tls import TlsFiles
from caravan_shard.adapter_file import AdapterFile, parse_adapter
from caravan_shard.kv_layout import KvLayout

# llama.cpp compiles with LLAMA_MAX_SEQ = 256.
MAX_SEQUENCES = 256
# llama.cpp rounds the cells of each sequence up to a multiple of this.
CELL_BLOCK = 256
_CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
_UNIX_PATH_BYTES = 107
_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardConfig:
    """The flags of ``caravan-shard``. Raises ValueError if two fields contradict each other."""

    model: str = flag("", "GGUF file to serve", "-m")
    model_draft: str = flag(
        "",
        "GGUF file of a smaller model with the same vocabulary, which drafts tokens where that saves time; "
        "it has as many KV cells as the model",
        "-md",
    )
    ctx_size: int = flag(
        8192,
        "KV cells of all sequences together; 0 = the context that the model was trained with",
        "-c",
        low=0,
        high=2**30,
    )
    parallel: int = flag(8, "most sequences held at a time", "-np", low=1, high=MAX_SEQUENCES)
    kv_layout: str = flag(
        "auto",
        "split: ctx-size / parallel cells for each sequence; unified: one pool of cells, prefixes are shared; "
        "auto: split while all sequences fit, else unified",
        choices=["auto", *(layout.value for layout in KvLayout)],
    )
    batch_size: int = flag(2048, "most tokens in one step", "-b", low=1, high=2**20)
    ubatch_size: int = flag(512, "most tokens computed at a time within a step", "-ub", low=1, high=2**20)
    threads: int | None = flag(None, "threads for a step over a single token [physical cores]", "-t", low=1, high=512)
    threads_batch: int | None = flag(
        None, "threads for every other step, also of two decoding sequences [as --threads]", "-tb", low=1, high=512
    )
    spin_count: int = flag(
        3_000,
        "how often a compute thread looks for its next part before it sleeps; see GOMP_SPINCOUNT",
        low=0,
        high=2**40,
    )
    gpu_layers: int = flag(0, "layers to keep on GPUs; -1 = all", "-ngl", "--n-gpu-layers", low=-1, high=10_000)
    gpu_layers_draft: int | None = flag(
        None,
        "layers of the draft model to keep on a GPU; -1 = all [all if --gpu-layers is not 0]",
        "-ngld",
        "--n-gpu-layers-draft",
        low=-1,
        high=10_000,
    )
    device: str = flag(
        "",
        "GPUs to use, by the names that --list-devices prints, separated by commas; none = the CPU alone [all GPUs]",
        "-dev",
    )
    rpc: str = flag(
        "",
        "rpc-servers of llama.cpp whose devices hold layers too: host:port, separated by commas; they check nobody, so "
        "only in a trusted network",
    )
    split_mode: str = flag(
        "layer",
        "how several GPUs share the model: by whole layers, by rows or tensors of each layer, or not (none)",
        "-sm",
        choices=("none", "layer", "row", "tensor"),
    )
    tensor_split: str = flag("", "proportions of the model on each GPU, such as 3,1 [as their free memory]", "-ts")
    main_gpu: int = flag(
        0, "the GPU for the whole model if --split-mode is none, counted from 0", "-mg", low=0, high=63
    )
    flash_attn: str = flag(
        "auto",
        "flash attention; auto: as llama.cpp decides, but off on CPUs where a step behind 512 tokens is faster without",
        "-fa",
        choices=("on", "off", "auto"),
    )
    cache_type_k: str = flag("f16", "data type of the cached keys", "-ctk", choices=_CACHE_TYPES)
    cache_type_v: str = flag("f16", "data type of the cached values", "-ctv", choices=_CACHE_TYPES)
    cache_ram: int = flag(
        8192,
        "most MiB of host memory for saved prefixes, at most what is free at the start; 0 = none is saved",
        "-cram",
        low=0,
        high=2**30,
    )
    cache_dir: str = flag(
        "", "folder for saved prefixes that cache-ram has no room for; they outlive the process and hold users' texts"
    )
    cache_dir_space: float = flag(8.0, "GiB of files in cache-dir, for each shard that uses it", low=0, high=2**20)
    embeddings: bool = flag(
        False,
        "serve vectors of texts of up to ubatch-size tokens, with a second context on the same weights",
        "--embedding",
    )
    pooling: str = flag(
        "model",
        "how the vectors of a text's tokens become one; model: as the file says, the mean if it says nothing",
        choices=("mean", "cls", "last", "model"),
    )
    lora: tuple[str, ...] = flag(
        (),
        "adapter for requests that name it: [NAME=]PATH[:SCALE], a GGUF file made for this model; repeatable",
    )
    sampling_threads: int = flag(
        1,
        "threads that choose tokens, and as many that compute what constraints allow; more than 1 only with idle cores",
        low=1,
        high=64,
    )
    address: str = flag("127.0.0.1:50051", "address to listen on, host:port or unix:/path")
    certfile: str | None = flag(
        None, "PEM file of the certificate chain; with it the shard obeys routers over TLS only, by their certificates"
    )
    keyfile: str | None = flag(None, "PEM file of the private key (default: in --certfile)")
    ca_certs: str | None = flag(None, "PEM file of authorities, one of which must have signed a router's certificate")
    allow_plaintext: bool = flag(
        False, "listen beyond loopback without TLS, so that whoever reaches the port commands the shard"
    )
    health_address: str = flag(
        "", "second address, host:port, that answers gRPC health checks only and without TLS, for probes of Kubernetes"
    )
    shard_id: str = flag("shard-0", "name of this shard in logs and metrics")
    backend: str = flag(
        "llama",
        "llama: llama.cpp; fake: a toy model for tests and simulations, whose name is that of --model",
        choices=("llama", "fake"),
    )
    fake_step_ms: float = flag(0.0, "toy model: milliseconds of a step", low=0, high=60_000)
    fake_token_ms: float = flag(0.0, "toy model: milliseconds of each token of a step", low=0, high=60_000)
    max_tokenize_bytes: int = flag(1 << 20, "most bytes of a text to tokenize", low=1, high=8 << 20)
    stall_timeout_s: float = flag(
        60.0, "report NOT_SERVING when there is work and no step completes for this long", low=0.1, high=86_400
    )
    drain_timeout_s: float = flag(30.0, "seconds for running sequences to end after SIGTERM", low=0, high=86_400)
    exit_with_parent: bool = flag(
        False, "end when the thread that started this process ends (Linux), so that a killed supervisor leaves no shard"
    )
    log_level: str = flag("info", "lowest level that is logged", choices=("debug", "info", "warning", "error"))
    json_output: bool = flag(False, "log JSON objects instead of text")

    def __post_init__(self) -> None:
        if self.backend == "llama" and not self.model:
            raise ValueError("no model given: pass --model FILE.gguf, or --backend fake for a toy model")
        path = self.unix_path
        if path is not None and not (path.name and len(os.fsencode(path)) <= _UNIX_PATH_BYTES):
            raise ValueError(f"the path of a unix socket has 1 to {_UNIX_PATH_BYTES} bytes. Given: {path!r}")
        if path is None and not self.address.rpartition(":")[2].isdecimal():
            raise ValueError(f"address must be host:port or unix:/path. Given: {self.address!r}")
        if self.health_address and not self.health_address.rpartition(":")[2].isdecimal():
            raise ValueError(f"health-address must be host:port. Given: {self.health_address!r}")
        self._check_security()
        if self.kv_layout == KvLayout.SPLIT.value and 0 < self.ctx_size < self.parallel * CELL_BLOCK:
            raise ValueError(
                f"kv-layout split needs ctx-size >= {CELL_BLOCK} for each of {self.parallel} sequences: "
                f"pass -c {self.parallel * CELL_BLOCK} or more, a smaller -np, or --kv-layout unified. "
                f"Given: {self.ctx_size}"
            )
        if self.batch_size < self.parallel:
            raise ValueError(
                f"batch-size must be >= parallel, or not all sequences can decode. "
                f"Given: {self.batch_size} and {self.parallel}"
            )
        if self.flash_attn == "off" and self.has_quantized_values:
            raise ValueError(f"cache-type-v {self.cache_type_v} needs flash attention: pass -fa on")
        parts = self.proportions
        if parts and not (min(parts) >= 0 and 0 < sum(parts) < math.inf):
            raise ValueError(f"tensor-split must have proportions >= 0, one of them > 0. Given: {self.tensor_split!r}")
        if self.rpc_servers and not self.uses_gpus:
            raise ValueError("rpc-servers would hold no layer: pass -ngl, and no --device none")
        if self.rpc_servers and self.split_mode not in {"layer", "none"}:
            raise ValueError(f"rpc-servers hold whole layers: pass -sm layer. Given: {self.split_mode}")
        if self.gpu_layers_draft is not None and not self.model_draft:
            raise ValueError("gpu-layers-draft needs --model-draft")
        names = [adapter.name for adapter in self.adapters]
        if len(set(names)) < len(names):
            raise ValueError(f"each lora needs a name of its own: pass NAME=PATH. Given: {', '.join(names)}")

    def _check_security(self) -> None:
        """Raise ValueError if flags of TLS are missing, or if strangers could command the shard."""
        if (self.certfile is None) != (self.ca_certs is None) or (self.keyfile and not self.certfile):
            raise ValueError("--certfile and --ca-certs need each other, and --keyfile needs both")
        if self.certfile is not None and self.unix_path is not None:
            raise ValueError("a Unix socket has no TLS: drop --certfile, or pass --address host:port")
        if self.certfile is None and not self.allow_plaintext and not self.is_private:
            raise ValueError(
                f"address {self.address} is not loopback, and whoever reaches it could command the shard: pass "
                "--certfile, --keyfile and --ca-certs for TLS, or --allow-plaintext if nobody else can reach it"
            )

    @property
    def is_private(self) -> bool:
        """Whether only programs on this host can reach the address."""
        host = self.address.rpartition(":")[0].strip("[]")
        if self.unix_path is not None or host == "localhost":
            return True
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False

    @property
    def tls(self) -> TlsFiles | None:
        """The files for TLS, or None for plaintext."""
        if self.certfile is None:
            return None
        return TlsFiles(prefix="--", certfile=self.certfile, keyfile=self.keyfile, ca_certs=self.ca_certs)

    @property
    def uses_gpus(self) -> bool:
        """Whether layers may be on GPUs, if there are any."""
        return self.gpu_layers != 0 and self.device_names != []

    @property
    def device_names(self) -> list[str] | None:
        """The devices that --device names; None for all."""
        if not self.device:
            return None
        return [] if self.device == "none" else [name.strip() for name in self.device.split(",")]

    @property
    def rpc_servers(self) -> list[str]:
        """The addresses that --rpc names; raises ValueError."""
        return parse_rpc_servers(self.rpc)

    @property
    def proportions(self) -> list[float]:
        """The proportions of --tensor-split; raises ValueError."""
        if not self.tensor_split:
            return []
        try:
            return [float(part) for part in self.tensor_split.split(",")]
        except ValueError:
            raise ValueError(f"tensor-split must be numbers with commas. Given: {self.tensor_split!r}") from None

    @property
    def has_quantized_values(self) -> bool:
        """Whether values are cached in a type that only flash attention can read."""
        return self.cache_type_v.startswith(("q", "iq"))

    @property
    def adapters(self) -> list[AdapterFile]:
        """The adapters that --lora names."""
        return [parse_adapter(text) for text in self.lora]

    def of_draft_model(self, cells: int, devices: Sequence[str] | None) -> "ShardConfig":
        """Return the flags of the draft model, which lies on one of ``devices``; on any if None."""
        layers = self.gpu_layers_draft
        return replace(
            self,
            model=self.model_draft,
            model_draft="",
            ctx_size=cells,
            kv_layout=KvLayout.UNIFIED.value,
            gpu_layers=(-1 if self.uses_gpus else 0) if layers is None else layers,
            device=self.device if devices is None else ",".join(devices) or "none",
            rpc="",
            split_mode="none",
            tensor_split="",
            embeddings=False,
            lora=(),
        )

    def layouts(self, cells: int) -> list[KvLayout]:
        """Return the layouts that a cache of ``cells`` cells may have, beginning with the first that it has."""
        if self.kv_layout != "auto":
            return [KvLayout(self.kv_layout)]
        if cells < self.parallel * CELL_BLOCK:
            return [KvLayout.UNIFIED]
        return [KvLayout.SPLIT, KvLayout.UNIFIED]

    @property
    def cache_dir_bytes(self) -> int:
        """The size of --cache-dir-space in bytes; 0 without a folder."""
        return int(self.cache_dir_space * _GIB) if self.cache_dir else 0

    @property
    def unix_path(self) -> Path | None:
        """The path of the Unix socket, or None if the address is host:port."""
        return Path(self.address.removeprefix("unix:")) if self.address.startswith("unix:") else None

    @property
    def decode_threads(self) -> int:
        """Threads for a step over one token."""
        return self.threads or physical_cores()

    @property
    def batch_threads(self) -> int:
        """Threads for every other step."""
        return self.threads_batch or self.decode_threads


def parse_rpc_servers(text: str) -> list[str]:
    """Return the addresses in the value of --rpc; raises ValueError."""
    servers = [server.strip() for server in text.split(",")] if text else []
    for server in servers:
        host, _, port = server.partition(":")
        if not host or not (port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16):
            raise ValueError(f"rpc must be host:port with commas, without IPv6. Given: {text!r}")
    if len(set(servers)) < len(servers):
        raise ValueError(f"rpc has a server twice. Given: {text!r}")
    return servers


def physical_cores() -> int:
    """Number of cores this process may use, hyperthreads counted once: compute-bound work gains nothing from them."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = set()
    for cpu in usable:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text().strip() if siblings.exists() else str(cpu))
    return max(1, len(cores))
