"""What users of Ollama, llama-server, vLLM, SGLang and TGI type is understood, or answered with what to type here."""

import shlex
import sys

import pytest

from caravan_proto.command_line import nearest
from caravan_serve.commands import COMMANDS, main
from caravan_serve.peers import COMMAND_ANSWERS, SERVE_FLAGS
from caravan_serve.peers import COMMANDS as FOREIGN
from caravan_serve.serve_flags import serve_parser
from caravan_testing.programs import status_of

_MOST_LINES = 3

# Command lines after `caravan`, and what the answer says.
WRONG = [
    # Mistyped.
    ("", "caravan run smollm2"),
    ("serv smollm2", "did you mean caravan serve?"),
    ("rnu smollm2", "did you mean caravan run?"),
    ("lst", "did you mean caravan list?"),
    ("smollm2", "did you mean caravan run smollm2"),
    ("hf.co/owner/repo", "caravan serve hf.co/owner/repo"),
    ("model.gguf", "caravan serve model.gguf"),
    ("-m model.gguf --port 8080", "did you mean caravan serve -m model.gguf --port 8080?"),
    ("--port 8080", "did you mean caravan serve --port 8080?"),
    ("serve m.gguf --prot 4220", "unknown flag --prot; did you mean --port?"),
    ("serve m.gguf --hots 0.0.0.0", "unknown flag --hots; did you mean --host?"),
    ("serve m.gguf --paralel 4", "unknown flag --paralel; did you mean --parallel?"),
    ("serve m.gguf --n-gpu-layer 99", "did you mean --n-gpu-layers?"),
    ("serve m.gguf --port http", "must be a whole number. Given: 'http'"),
    ("serve m.gguf --port", "argument --port/-p: expected one argument"),
    ("serve m.gguf --port=70000", "must be >= 0 and <= 65535. Given: 70000"),
    ("pull smollm2 --quiet", "unknown flag --quiet"),
    ("list --all", "unknown flag --all"),
    ("rm", "required: name"),
    ("show smollm2 extra", "unexpected argument 'extra'"),
    ("bench", "required: --url"),
    ("key", "required: name"),
    ("completion powershell", "choose from"),
    ("run", "caravan run smollm2"),
    ("run smollm2 --sytem x", "did you mean --system?"),
    ("run smollm2 --set temprature=1", "did you mean temperature?"),
    ("run smollm2 --verbose", "/help"),
    ("batch", "required: -o/--output"),
    ("batch requests.jsonl -o out.jsonl", "name a model"),
    ("batch none.jsonl -m smollm2 -o out.jsonl", "there is no file none.jsonl"),
    ("batch none.jsonl -m smollm2 -o out.jsonl --serve threads", "such as threads=4"),
    ("launch cluade", "did you mean claude?"),
    ("launch vim", "known are codex, claude"),
    ("launch --serve threads codex", "such as threads=4"),
    # Ollama.
    ("chat smollm2", "did you mean caravan run smollm2?"),
    ("ls", "did you mean caravan list?"),
    ("create m -f Modelfile", "POST /api/create"),
    ("cp a b", "POST /api/copy"),
    ("push owner/m", "uploads no models"),
    ("signin", "HF_TOKEN"),
    ("serve smollm2 --keep-alive 5m", "--models-hub"),
    # llama-server.
    ("serve -hf", "argument -hf: expected one argument"),
    ("serve m.gguf --api-key-file keys.txt", "--api-keys-file keys.toml"),
    ("serve m.gguf --seed 1", "requests set it"),
    ("serve m.gguf --log-file /nowhere/f", "--log-file: cannot write /nowhere/f"),
    ("serve m.gguf --config /nowhere/f", "cannot read --config /nowhere/f"),
    ("serve m.gguf --root-path x", "--root-path must begin with a slash"),
    ("serve m.gguf -v", "--log-level debug"),
    ("serve m.gguf --chat-template chatml", "--chat-template-file FILE"),
    ("serve m.gguf --jinja", "leave it out"),
    ("serve m.gguf -cb", "leave it out"),
    ("serve m.gguf --slot-save-path d", "--cache-dir FOLDER"),
    ("serve m.gguf --kv-unified", "--kv-layout unified"),
    # vLLM and SGLang.
    ("run-batch -i in.jsonl -o out.jsonl --model m", "did you mean caravan batch -i in.jsonl"),
    ("batch -i in.jsonl -o out.jsonl -m m", "caravan batch FILE"),
    ("batch in.jsonl -o out.jsonl -m m --max-num-seqs 8", "--serve parallel=N"),
    ("serve m --max-model-len 4096", "--max-total-tokens N"),
    ("serve m --tensor-parallel-size 2", "--split-mode"),
    ("serve m --gpu-memory-utilization 0.9", "--fit-target MIB"),
    ("serve m --dtype bfloat16", "hf:OWNER/REPOSITORY:Q8_0"),
    ("serve m --trust-remote-code", "leave it out"),
    ("serve m --enable-auto-tool-choice", "chat template"),
    ("serve m --tool-call-parser hermes", "chat template"),
    ("serve m --speculative-config {}", "--speculate N"),
    ("serve m --disable-radix-cache", "--prefix-caching off"),
    ("serve m --mem-fraction-static 0.8", "--fit-target MIB"),
    # TGI.
    ("serve m --quantize awq", "hf:OWNER/REPOSITORY:Q8_0"),
    ("serve m --revision main", "@REVISION"),
    ("serve m --huggingface-hub-cache d", "HF_HUB_CACHE"),
    ("serve m --cuda-memory-fraction 0.8", "--fit-target MIB"),
]


@pytest.mark.parametrize(("line", "answer"), WRONG, ids=[line or "nothing" for line, _ in WRONG])
def test_a_wrong_command_line_is_answered_with_what_to_type(
    line: str, answer: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["caravan", *shlex.split(line)])
    status = status_of(main)
    written = capsys.readouterr()
    assert (status, written.out) == (2, "")
    assert answer in written.err
    assert written.err.count("\n") <= _MOST_LINES
    assert "usage:" not in written.err


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("--host 0.0.0.0", "hostname", "0.0.0.0"),
        ("--host=0.0.0.0", "hostname", "0.0.0.0"),
        ("--ctx 4096", "ctx_size", 4096),
        ("--context-length 4096", "ctx_size", 4096),
        ("-c 4096", "ctx_size", 4096),
        ("-ngl 99", "gpu_layers", 99),
        ("--n-gpu-layers 99", "gpu_layers", 99),
        ("-hf owner/repo:Q8_0", "words", ["hf:owner/repo:Q8_0"]),
        ("--hf-repo=owner/repo", "words", ["hf:owner/repo"]),
        ("-hf hf:owner/repo", "words", ["hf:owner/repo"]),
        ("--model-path m.gguf", "models", ["m.gguf"]),
        ("--model-id m.gguf", "models", ["m.gguf"]),
        ("m.gguf --served-model-name x", "alias", ["x"]),
        ("m.gguf --host=::1 --prometheus-port 9000", "metrics_port", 9000),
        ("m.gguf --disable-log-requests", "access_log", False),
        ("m.gguf --api-prefix /x", "root_path", "/x"),
        ("m.gguf --num-shard 2", "shards", 2),
        ("m.gguf --max-num-seqs 4", "parallel", 4),
        ("m.gguf --no-webui", "page", False),
        ("m.gguf --draft-max 4", "speculate", 4),
        ("m.gguf --temperature 0.2", "temp", 0.2),
        ("m.gguf -n 128", "max_tokens", 128),
        ("m.gguf --num-predict 128", "max_tokens", 128),
    ],
)
def test_flags_of_peers_with_our_meaning_are_taken(line: str, name: str, value: object) -> None:
    assert getattr(serve_parser().parse_models(shlex.split(line)), name) == value


def test_the_tables_of_peers_lead_to_what_exists_and_hide_nothing() -> None:
    own = set(serve_parser().flags)
    foreign = {*SERVE_FLAGS.renamed, *SERVE_FLAGS.answers, *SERVE_FLAGS.prefixed}
    assert set(SERVE_FLAGS.renamed.values()) <= own
    assert not foreign & own, "it is a flag of ours now: remove it from the table"
    assert set(FOREIGN.values()) <= set(COMMANDS)
    assert not {*FOREIGN, *COMMAND_ANSWERS} & set(COMMANDS)


def test_the_nearest_name_is_one_that_is_near() -> None:
    assert nearest("--hostnam", ["--hostname", "--port"]) == "--hostname"
    assert nearest("--xyz", ["--hostname", "--port"]) == ""
