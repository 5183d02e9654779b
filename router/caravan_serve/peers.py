"""What people type who come from Ollama, llama-server, vLLM, SGLang or TGI, and what it is here."""

from caravan_models.reference import HUB_PREFIX
from caravan_proto.command_line import ForeignFlags

_KEYS = "write a file of keys with `caravan key NAME >> keys.toml` and pass --api-keys-file keys.toml"
_BY_REQUEST = "requests set it"
_ALWAYS = "leave it out, it is always on"
_TEMPLATE = "leave it out, the model's chat template decides"
_GGUF = f"a GGUF file has its own; choose it by the model's name, such as {HUB_PREFIX}OWNER/REPOSITORY:Q8_0"
_SPLIT = "layers are split over this host's GPUs without a flag; see --split-mode, --tensor-split and --rpc"
_OWN = "it is for caravan-shard, and caravan serve sets it for each shard"
_LEVEL = "pass --log-level debug"
_SPECULATE = "--speculate N"

SERVE_FLAGS = ForeignFlags(
    renamed={
        "--host": "--hostname",
        "--ctx": "--ctx-size",
        "--context-length": "--ctx-size",
        "--num-ctx": "--ctx-size",
        "--model-path": "--model",
        "--model-id": "--model",
        "--model_path": "--model",
        "--served-model-name": "--alias",
        "--num-shard": "--shards",
        "--data-parallel-size": "--shards",
        "--dp-size": "--shards",
        "-dp": "--shards",
        "--n-parallel": "--parallel",
        "--max-num-seqs": "--parallel",
        "--max-running-requests": "--parallel",
        "--num-gpu": "--gpu-layers",
        "--draft-model": "--model-draft",
        "--speculative-model": "--model-draft",
        "--draft": "--speculate",
        "--draft-max": "--speculate",
        "--num-speculative-tokens": "--speculate",
        "--lora-adapters": "--lora",
        "--lora-modules": "--lora",
        "--ssl-key-file": "--ssl-keyfile",
        "--ssl-cert-file": "--ssl-certfile",
        "--allowed-origins": "--cors-allow-origin",
        "--no-webui": "--no-page",
        "--no-ui": "--no-page",
        "--disable-uvicorn-access-log": "--no-access-log",
        "--disable-log-requests": "--no-access-log",
        "--prometheus-port": "--metrics-port",
        "--temperature": "--temp",
        "--predict": "--max-tokens",
        "--num-predict": "--max-tokens",
    },
    prefixed=dict.fromkeys(("-hf", "-hfr", "--hf-repo"), HUB_PREFIX),
    answers={
        "--api-key-file": _KEYS,
        **dict.fromkeys(("--address", "--shard-id", "--ready-fd"), _OWN),
        **dict.fromkeys(("-v", "-vv", "--verbose", "-lv", "--verbosity", "--log-verbosity", "--debug"), _LEVEL),
        "--log-disable": "pass --log-level error",
        "--chat-template": "pass --chat-template-file FILE with a Jinja template",
        **dict.fromkeys(("--seed", "-s"), _BY_REQUEST),
        **dict.fromkeys(("--tensor-parallel-size", "-tp", "--tp", "--tp-size", "--pipeline-parallel-size"), _SPLIT),
        **dict.fromkeys(
            ("--gpu-memory-utilization", "--mem-fraction-static", "--cuda-memory-fraction"),
            "--fit-target MIB is what stays free on each GPU",
        ),
        "--max-model-len": "--ctx-size N is for all sequences together, and --max-total-tokens N limits each request",
        **dict.fromkeys(("--quantization", "--quantize", "-q", "--dtype", "--load-format"), _GGUF),
        "--kv-cache-dtype": "pass -ctk TYPE and -ctv TYPE, such as q8_0",
        "--revision": f"pass it in the model's name: {HUB_PREFIX}OWNER/REPOSITORY@REVISION",
        **dict.fromkeys(("--hf-token", "-hft"), "set the environment variable HF_TOKEN"),
        **dict.fromkeys(
            ("--download-dir", "--huggingface-hub-cache"), "set the environment variable HF_HUB_CACHE to the folder"
        ),
        "--hf-file": f"pass it in the model's name: {HUB_PREFIX}OWNER/REPOSITORY:FILE.gguf",
        "--trust-remote-code": "leave it out, nothing in a GGUF file is run",
        **dict.fromkeys(("--jinja", "-cb", "--cont-batching", "--metrics", "--slots", "--props"), _ALWAYS),
        **dict.fromkeys(("--enable-prefix-caching", "--cache-prompt", "--enable-chunked-prefill"), _ALWAYS),
        **dict.fromkeys(
            ("--no-enable-prefix-caching", "--disable-radix-cache", "--no-cache-prompt"), "pass --prefix-caching off"
        ),
        **dict.fromkeys(("--enable-auto-tool-choice", "--tool-call-parser"), _TEMPLATE),
        **dict.fromkeys(("--reasoning-parser", "--reasoning-format", "--enable-reasoning"), _TEMPLATE),
        **dict.fromkeys(("--rerank", "--reranking", "--enforce-eager", "--warmup"), "leave it out, it is not needed"),
        **dict.fromkeys(("-kvu", "--kv-unified"), "pass --kv-layout unified"),
        "--slot-save-path": "pass --cache-dir FOLDER",
        **dict.fromkeys(
            ("--speculative-config", "--speculative-algorithm"), f"pass {_SPECULATE}, or --model-draft FILE"
        ),
        "--swap-space": "--cache-ram MIB is host memory for prefixes and preempted requests",
        **dict.fromkeys(("--keep-alive", "--sleep-idle-seconds"), "--models-hub loads and unloads models on demand"),
    },
)

# Commands of other programs, by the command of ours that does it.
COMMANDS = {
    "chat": "run",
    "cli": "run",
    "generate": "run",
    "complete": "run",
    "start": "serve",
    "server": "serve",
    "up": "serve",
    "download": "pull",
    "get": "pull",
    "ls": "list",
    "models": "list",
    "tags": "list",
    "info": "show",
    "inspect": "show",
    "remove": "rm",
    "delete": "rm",
    "status": "ps",
    "unload": "stop",
    "load": "run",
    "benchmark": "bench",
    "run-batch": "batch",
    "completions": "completion",
}
COMMAND_ANSWERS = {
    "create": "a server with --models-hub derives models: POST /api/create, see docs/models.md",
    "cp": "a server with --models-hub names copies: POST /api/copy, see docs/models.md",
    "push": "Caravan uploads no models",
    "signin": "no account is needed; HF_TOKEN is for gated repositories",
    "login": "no account is needed; HF_TOKEN is for gated repositories",
    "version": "caravan --version prints it",
}
