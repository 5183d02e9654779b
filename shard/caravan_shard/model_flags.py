"""The shard's flags for the model's file, its cells and its steps."""

from dataclasses import dataclass

from caravan_proto.flags import flag
from caravan_proto.messages.limits import KvLayout

# llama.cpp compiles with LLAMA_MAX_SEQ = 256.
MAX_SEQUENCES = 256
_CELLS = 8192


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """Flags of `ShardConfig`."""

    model: str = flag("", "GGUF file to serve, or a model name: hf:OWNER/REPOSITORY:QUANTISATION, smollm2", "-m")
    alias: str = flag(
        "",
        "name by which clients call the model; of several, separated by commas, the first is listed as its name [the "
        "file's name]",
        "-a",
    )
    chat_template_file: str = flag(
        "",
        "file with a Jinja chat template to use instead of the one in the model's file; all shards of a model need "
        "the same one",
    )
    model_draft: str = flag(
        "",
        "smaller model with the same vocabulary that drafts tokens where that saves time: a GGUF file or a model "
        "name; it gets as many KV cells as the model",
        "-md",
    )
    ctx_size: int | None = flag(
        None,
        "number of KV cells for all sequences together; 0 = the model's trained context [8192; on GPUs with --fit as "
        "many as fit, from --fit-ctx to the trained context]",
        "-c",
        low=0,
        high=2**30,
    )
    parallel: int = flag(8, "maximum number of sequences held at a time", "-np", low=1, high=MAX_SEQUENCES)
    rollback_tokens: int = flag(
        0,
        "maximum number of draft tokens per sequence and step for a model with recurrent layers; llama.cpp rolls "
        "wrong ones back, for some architectures; each takes as much memory as the recurrent states of all "
        "sequences; caravan serve uses the value of --speculate, at most 8",
        low=0,
        high=64,
    )
    kv_layout: str = flag(
        "auto",
        "split: ctx-size / parallel cells for each sequence; unified: one pool of cells with shared prefixes; auto: "
        "split while all sequences fit, else unified",
        choices=["auto", *(layout.value for layout in KvLayout)],
    )
    batch_size: int = flag(2048, "maximum number of tokens per step", "-b", low=1, high=2**20)
    ubatch_size: int = flag(512, "maximum number of tokens computed at a time within a step", "-ub", low=1, high=2**20)
    threads: int | None = flag(
        None,
        "threads for steps with a single token [physical cores, at most the CPU quota of the control group]",
        "-t",
        low=1,
        high=512,
    )
    threads_batch: int | None = flag(
        None,
        "threads for all other steps, including those of two decoding sequences [as --threads]",
        "-tb",
        low=1,
        high=512,
    )
    spin_count: int = flag(
        3_000,
        "how often a compute thread polls for work before it sleeps; see GOMP_SPINCOUNT",
        low=0,
        high=2**40,
    )

    def cells_of(self, trained_context: int) -> int:
        """Return the number of cells to ask for; llama.cpp may round it up."""
        return _CELLS if self.ctx_size is None else self.ctx_size or trained_context
