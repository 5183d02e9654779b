"""The shard's flags for the model's files, its cells and steps, its positions, and images and audio in prompts."""

import re
from dataclasses import dataclass
from pathlib import Path

from caravan_proto.flags import flag
from caravan_proto.messages.adapters import is_adapter_name
from caravan_proto.messages.limits import KvLayout
from caravan_shard.adapter_file import AdapterFile

_SCALED = re.compile(r"(.+):(-?\d+(?:\.\d+)?)")

# llama.cpp compiles with LLAMA_MAX_SEQ = 256.
MAX_SEQUENCES = 256
# Cells of a shard that chooses none by what the model was trained for and by what is free.
USUAL_CELLS = 8192


def parse_adapter(text: str) -> AdapterFile:
    """Parse ``[NAME=]PATH[:SCALE]``. The default name is the file's, without its suffix. Raises ValueError."""
    name, separator, rest = text.partition("=")
    if not separator:
        name, rest = "", text
    scaled = _SCALED.fullmatch(rest)
    path = Path(scaled[1] if scaled else rest)
    if not separator:
        name = path.stem
    if not path.name or not is_adapter_name(name):
        raise ValueError(
            "lora must be PATH, NAME=PATH or NAME=PATH:SCALE, with a name of 1 to 128 characters that are not blank. "
            f"Given: {text!r}"
        )
    return AdapterFile(name, path, float(scaled[2]) if scaled else 1.0)


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """Flags of `ShardConfig`."""

    model: str = flag("", "GGUF file to serve, or a model name: hf:OWNER/REPOSITORY:QUANTISATION, smollm2", "-m")
    alias: str = flag(
        "",
        "name by which clients call the model; of several, separated by commas or flags, the first is listed as its "
        "name [the file's name]",
        "-a",
        joined=True,
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
    spec_type: str = flag(
        "none",
        "what drafts where that saves time; draft-mtp: the model's own head for the tokens after the next one (MTP); "
        "draft-eagle3, draft-dflash, draft-dspark: --model-draft, which is such a head of the model; auto: "
        "--model-draft, or a head in the model's file that can be used",
        choices=("none", "auto", "draft-mtp", "draft-eagle3", "draft-dflash", "draft-dspark"),
    )
    ctx_size: int | None = flag(
        None,
        "number of KV cells for all sequences together; 0 = the model's trained context, whether it fits or not [the "
        "trained context, as far as it fits; 8192 with --fit off]",
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
        return USUAL_CELLS if self.ctx_size is None else self.ctx_size or trained_context


@dataclass(frozen=True, kw_only=True)
class RopeFlags:
    """Flags of `ShardConfig`. What is None is as the model's file says."""

    rope_scaling: str = flag(
        "model",
        "encoding of positions beyond the trained context; model: as the file says, linear if it says nothing",
        choices=("model", "none", "linear", "yarn"),
    )
    rope_scale: float | None = flag(
        None,
        "factor by which sequences may exceed the trained context; positions are divided by it",
        low=1e-3,
        high=1e6,
    )
    rope_freq_base: float | None = flag(None, "base of the RoPE frequencies [of the file]", low=1, high=1e12)
    rope_freq_scale: float | None = flag(
        None, "factor that positions are multiplied by: 1 / --rope-scale [of the file]", low=1e-6, high=1e3
    )
    yarn_orig_ctx: int | None = flag(
        None,
        "YaRN: context size that the model was trained with before it was extended [of the file]",
        low=1,
        high=2**30,
    )
    yarn_ext_factor: float | None = flag(
        None, "YaRN: extrapolation mix; 0 = interpolate only [of the file]", low=0, high=1e3
    )
    yarn_attn_factor: float | None = flag(None, "YaRN: scale of the attention scores [of the file]", low=0, high=1e3)
    yarn_beta_slow: float | None = flag(
        None,
        "YaRN: dimensions with fewer rotations within the context are interpolated [of the file]",
        low=0,
        high=1e6,
    )
    yarn_beta_fast: float | None = flag(
        None,
        "YaRN: dimensions with more rotations within the context are left unchanged [of the file]",
        low=0,
        high=1e6,
    )

    def _check_rope(self) -> None:
        """Raise ValueError if fields contradict each other."""
        if self.rope_scale is not None and self.rope_freq_scale is not None:
            raise ValueError(
                "rope-freq-scale is 1 / rope-scale: pass one of them. "
                f"Given: {self.rope_freq_scale} and {self.rope_scale}"
            )
        if self.yarn_attn_factor is not None and self.rope_scaling == "yarn" and self.yarn_ext_factor != 0:
            raise ValueError(
                "yarn-attn-factor has no effect beside extrapolation, for which llama.cpp computes the factor itself: "
                f"pass --yarn-ext-factor 0, or drop it. Given: {self.yarn_attn_factor}"
            )

    @property
    def frequency_scale(self) -> float | None:
        """The factor of the positions; None for that of the file."""
        return self.rope_freq_scale if self.rope_scale is None else 1 / self.rope_scale

    @property
    def rope_changes(self) -> tuple[tuple[str, float | str], ...]:
        """What differs from the file, by name; empty if nothing does. Cells of other changes are other cells."""
        scaling = None if self.rope_scaling == "model" else self.rope_scaling
        values = {
            "scaling": scaling,
            "freq_base": self.rope_freq_base,
            "freq_scale": self.frequency_scale,
            "orig_ctx": self.yarn_orig_ctx,
            "ext_factor": self.yarn_ext_factor,
            "attn_factor": self.yarn_attn_factor,
            "beta_slow": self.yarn_beta_slow,
            "beta_fast": self.yarn_beta_fast,
        }
        return tuple((name, value) for name, value in values.items() if value is not None)

    def longest_context(self, trained_context: int) -> int:
        """Return the maximum number of tokens of a sequence; 0 for any number.

        A model computes what it was trained for, times the scale that the flags give. Where they give another base,
        nothing says how far it reaches.
        """
        scale = self.frequency_scale
        if scale is not None and scale < 1:
            return int((self.yarn_orig_ctx or trained_context) / scale)
        return 0 if self.rope_freq_base is not None else trained_context


@dataclass(frozen=True, kw_only=True)
class MediaFlags:
    """Flags of `ShardConfig`."""

    mmproj: str = flag(
        "",
        "GGUF file of the projector for image or audio input [a file beside the model with mmproj in its name]",
        "-mm",
    )
    mmproj_auto: bool = flag(
        True, "look for a projector beside the model; when off, prompts are text only", negation="--no-mmproj"
    )
    image_min_tokens: int | None = flag(
        None,
        "minimum number of tokens per image, if its size decides the number [as the projector says]",
        low=1,
        high=2**16,
    )
    image_max_tokens: int | None = flag(
        None,
        "maximum number of tokens per image, if its size decides the number [as the projector says]",
        low=1,
        high=2**16,
    )
    enable_prompt_embeds: bool = flag(
        False, "accept prompts of embeddings, which the model reads in place of tokens (prompt_embeds of completions)"
    )
    media_threads: int | None = flag(
        None, "threads that encode images and audio, in parallel with steps [as --threads]", low=1, high=512
    )
    media_cache: int = flag(
        256,
        "maximum size of encoded images, audio and embeddings kept for later prompts, in MiB; each single one must fit",
        low=1,
        high=2**20,
    )

    @property
    def media_cache_bytes(self) -> int:
        """The size of --media-cache in bytes."""
        return self.media_cache << 20

    def _check_media(self) -> None:
        """Raise ValueError if fields contradict each other."""
        if self.mmproj and not self.mmproj_auto:
            raise ValueError("--mmproj and --no-mmproj contradict each other")
        least, most = self.image_min_tokens, self.image_max_tokens
        if least is not None and most is not None and least > most:
            raise ValueError(f"image-min-tokens must be <= image-max-tokens. Given: {least} and {most}")
