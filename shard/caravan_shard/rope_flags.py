"""The shard's flags for how positions are encoded: they change what the model computes."""

from dataclasses import dataclass

from caravan_proto.flags import flag


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
        """Return the most tokens of a sequence; 0 for any number.

        A model computes what it was trained for, times the scale that the flags give. Where they give another base,
        nothing says how far it reaches.
        """
        scale = self.frequency_scale
        if scale is not None and scale < 1:
            return int((self.yarn_orig_ctx or trained_context) / scale)
        return 0 if self.rope_freq_base is not None else trained_context
