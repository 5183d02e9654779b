"""The shard's flags and their limits. A flag that llama-server has too has llama-server's name."""

import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from caravan_proto.flags import flag
from caravan_proto.messages.limits import KvLayout
from caravan_proto.messages.model import ModelFile
from caravan_proto.tls import TlsFiles
from caravan_shard.adapter_file import AdapterFile
from caravan_shard.cores import usable_cores
from caravan_shard.default_flags import DefaultFlags
from caravan_shard.model_flags import MediaFlags, ModelFlags, RopeFlags, parse_adapter
from caravan_shard.placement_flags import PlacementFlags

# llama.cpp rounds the cells of each sequence up to a multiple of this.
CELL_BLOCK = 256
_CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
_UNIX_PATH_BYTES = 107
_GIB = 1 << 30
# As many as errors show of the name that a request asks for.
_ALIAS_LENGTH = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardConfig(MediaFlags, RopeFlags, DefaultFlags, PlacementFlags, ModelFlags):
    """The flags of ``caravan-shard``. Raises ValueError if two fields contradict each other."""

    flash_attn: str = flag(
        "auto",
        "flash attention; auto: as llama.cpp decides, which turns it on wherever it works",
        "-fa",
        choices=("on", "off", "auto"),
    )
    backend_sampling: str = flag(
        "auto",
        "find the highest logits on the device and transfer no others where these suffice; tokens are the same; "
        "auto: on GPUs where a timing at start finds it clearly faster",
        "-bs",
        choices=("on", "off", "auto"),
    )
    exact: bool = flag(
        False,
        "compute every token bit-identically, independent of batching, prompt chunks and failover; slower, and "
        "refused if a check at start finds a difference",
    )
    cache_type_k: str = flag("f16", "data type of cached keys", "-ctk", choices=_CACHE_TYPES)
    cache_type_v: str = flag("f16", "data type of cached values", "-ctv", choices=_CACHE_TYPES)
    cache_ram: int = flag(
        8192,
        "maximum host memory for saved prefixes in MiB, limited to what is free at start; 0 = save none",
        "-cram",
        low=0,
        high=2**30,
    )
    cache_dir: str = flag(
        "",
        "folder for saved prefixes that do not fit into --cache-ram; its files outlive the process and contain "
        "users' texts",
    )
    cache_dir_space: float = flag(
        8.0, "maximum size of the files in --cache-dir in GiB, for each shard that uses it", low=0, high=2**20
    )
    embeddings: bool = flag(
        False,
        "serve embeddings of texts of up to ubatch-size tokens, with a second context on the same weights; "
        "embedding-only models do so without this flag",
        "--embedding",
    )
    pooling: str = flag(
        "model",
        "how the vectors of a text's tokens become one; model: as the file says, mean if it says nothing",
        choices=("mean", "cls", "last", "model"),
    )
    lora: tuple[str, ...] = flag(
        (),
        "LoRA adapter for requests that name it: [NAME=]PATH[:SCALE], a GGUF file made for this model; repeatable",
    )
    lora_dir: str = flag(
        "",
        "folder of LoRA adapters that operators may load and unload while the shard runs; without it, none may be",
    )
    max_loras: int = flag(8, "maximum number of adapters loaded from --lora-dir at a time", low=1, high=1024)
    sampling_threads: int = flag(
        1,
        "threads for sampling, and as many again for computing what constraints allow; more than 1 only with idle "
        "cores",
        low=1,
        high=64,
    )
    address: str = flag("127.0.0.1:50051", "address to listen on, host:port or unix:/path")
    certfile: str | None = flag(
        None,
        "PEM file of the certificate chain; with it, the shard accepts routers over TLS only and checks their "
        "certificates",
    )
    keyfile: str | None = flag(None, "PEM file of the private key (default: in --certfile)")
    ca_certs: str | None = flag(
        None, "PEM file of certificate authorities; a router's certificate must be signed by one of them"
    )
    allow_plaintext: bool = flag(
        False, "listen beyond loopback without TLS, which lets anyone who reaches the port control the shard"
    )
    health_address: str = flag(
        "", "second address, host:port, that answers only gRPC health checks, without TLS, for Kubernetes probes"
    )
    shard_id: str = flag("shard-0", "name of this shard in logs and metrics")
    backend: str = flag(
        "llama",
        "llama: llama.cpp; fake: a toy model for tests and simulations, named by --model",
        choices=("llama", "fake"),
    )
    fake_step_ms: float = flag(0.0, "toy model: milliseconds per step", low=0, high=60_000)
    fake_token_ms: float = flag(0.0, "toy model: milliseconds per token of a step", low=0, high=60_000)
    max_tokenize_bytes: int = flag(1 << 20, "maximum size of a text to tokenize, in bytes", low=1, high=8 << 20)
    stall_timeout_s: float = flag(
        60.0,
        "seconds without a completed step, while there is work, after which the shard reports NOT_SERVING",
        low=0.1,
        high=86_400,
    )
    drain_timeout_s: float = flag(30.0, "seconds for running sequences to finish after SIGTERM", low=0, high=86_400)
    exit_with_parent: bool = flag(
        False,
        "exit when the thread that started this process ends (Linux), so that a killed supervisor leaves no shard "
        "running",
    )
    ready_fd: int = flag(
        -1, "open file descriptor to which a newline is written once the shard listens; -1: none", low=-1
    )
    log_level: str = flag("info", "minimum level to log", choices=("debug", "info", "warning", "error"))
    json_output: bool = flag(False, "log JSON objects instead of text")
    log_file: str | None = flag(None, "file to append the log to (default: standard error)")

    def __post_init__(self) -> None:
        if self.backend == "llama" and not self.model:
            raise ValueError(
                "no model given: pass --model FILE.gguf or the name of a model, or --backend fake for a toy model"
            )
        path = self.unix_path
        if path is not None and not (path.name and len(os.fsencode(path)) <= _UNIX_PATH_BYTES):
            raise ValueError(f"the path of a unix socket has 1 to {_UNIX_PATH_BYTES} bytes. Given: {path!r}")
        if path is None and not self.address.rpartition(":")[2].isdecimal():
            raise ValueError(f"address must be host:port or unix:/path. Given: {self.address!r}")
        if self.health_address and not self.health_address.rpartition(":")[2].isdecimal():
            raise ValueError(f"health-address must be host:port. Given: {self.health_address!r}")
        self._check_security()
        if self.exact and self.kv_layout == KvLayout.UNIFIED.value:
            raise ValueError(
                "exact needs separate cells for each sequence, since places in a common pool depend on the others. "
                "Given: kv-layout unified"
            )
        if 0 < self.cells_of(0) < self.parallel * CELL_BLOCK and (self.exact or self.kv_layout == KvLayout.SPLIT.value):
            what, instead = ("exact", "drop --exact") if self.exact else ("kv-layout split", "--kv-layout unified")
            raise ValueError(
                f"{what} needs ctx-size >= {CELL_BLOCK} for each of {self.parallel} sequences: "
                f"pass -c {self.parallel * CELL_BLOCK} or more, a smaller -np, or {instead}. Given: {self.cells_of(0)}"
            )
        if self.batch_size < self.parallel:
            raise ValueError(
                f"batch-size must be >= parallel, or not all sequences can decode. "
                f"Given: {self.batch_size} and {self.parallel}"
            )
        if self.flash_attn == "off" and self.has_quantized_values:
            raise ValueError(f"cache-type-v {self.cache_type_v} needs flash attention: pass -fa on")
        self._check_placement()
        self._check_rope()
        self._check_media()
        if self.gpu_layers_draft is not None and not self.model_draft:
            raise ValueError("gpu-layers-draft needs --model-draft")
        if self.spec_type == "draft-mtp" and self.model_draft:
            raise ValueError("spec-type draft-mtp drafts with the model's own head: drop --model-draft, or pass none")
        if self.spec_type in ("draft-eagle3", "draft-dflash", "draft-dspark") and not self.model_draft:
            raise ValueError(f"spec-type {self.spec_type} needs the file of the head: pass --model-draft")
        for alias in self.aliases:
            if not (alias and alias.isprintable() and alias == alias.strip() and len(alias) <= _ALIAS_LENGTH):
                raise ValueError(
                    f"alias must have at least one and at most {_ALIAS_LENGTH} printable characters, and begin and end "
                    f"with no space; so must each of several, between commas. Given: {self.alias!r}"
                )
        if len(set(self.aliases)) < len(self.aliases):
            raise ValueError(f"each alias must differ from the others. Given: {self.alias!r}")
        names = [adapter.name for adapter in self.adapters]
        if len(set(names)) < len(names):
            raise ValueError(f"each lora needs its own name: pass NAME=PATH. Given: {', '.join(names)}")

    def _check_security(self) -> None:
        """Raise ValueError if flags of TLS are missing, or if strangers could command the shard."""
        if (self.certfile is None) != (self.ca_certs is None) or (self.keyfile and not self.certfile):
            raise ValueError("--certfile and --ca-certs need each other, and --keyfile needs both")
        if self.certfile is not None and self.unix_path is not None:
            raise ValueError("a Unix socket has no TLS: drop --certfile, or pass --address host:port")
        if self.certfile is None and not self.allow_plaintext and not self.is_private:
            raise ValueError(
                f"address {self.address} is not loopback, and anyone who reaches it could command the shard: pass "
                "--certfile, --keyfile and --ca-certs for TLS, or --allow-plaintext if no one else can reach it"
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
    def has_quantized_values(self) -> bool:
        """Whether values are cached in a type that only flash attention can read."""
        return self.cache_type_v.startswith(("q", "iq"))

    @property
    def aliases(self) -> tuple[str, ...]:
        """The names of ``alias``; none if the model is called like its file."""
        return tuple(self.alias.split(",")) if self.alias else ()

    def named(self, facts: ModelFile) -> ModelFile:
        """Return ``facts`` with the names of ``alias``, if there are any."""
        return replace(facts, name=self.aliases[0], aliases=self.aliases[1:]) if self.aliases else facts

    @property
    def adapters(self) -> list[AdapterFile]:
        """The adapters that --lora names."""
        return [parse_adapter(text) for text in self.lora]

    def of_draft_model(self, cells: int, devices: Sequence[str] | None) -> "ShardConfig":
        """Return the flags of the draft model, which lies on one of ``devices``; on any if None.

        As in llama-server, it has no tensors elsewhere, and all that is said of files and positions holds for it too.
        """
        layers = self.gpu_layers_draft
        return replace(
            self,
            model=self.model_draft,
            model_draft="",
            spec_type="none",
            ctx_size=cells,
            kv_layout=KvLayout.UNIFIED.value,
            exact=False,
            # It is cut back by more than a step of its own has.
            rollback_tokens=0,
            gpu_layers=(-1 if self.uses_gpus else 0) if layers is None else layers,
            device=self.device if devices is None else ",".join(devices) or "none",
            rpc="",
            split_mode="none",
            tensor_split="",
            cpu_moe=False,
            n_cpu_moe=0,
            override_tensor=(),
            embeddings=False,
            lora=(),
            lora_dir="",
            mmproj="",
            mmproj_auto=False,
        )

    def layouts(self, cells: int) -> list[KvLayout]:
        """Return the layouts that a cache of ``cells`` cells may have, beginning with the first that it has."""
        if self.exact:
            return [KvLayout.SPLIT]
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
        return self.threads or usable_cores()

    @property
    def batch_threads(self) -> int:
        """Threads for every other step."""
        return self.threads_batch or self.decode_threads
