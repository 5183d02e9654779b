"""The shard's flags for pictures and sound in prompts."""

from dataclasses import dataclass

from caravan_proto.flags import flag


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
    media_threads: int | None = flag(
        None, "threads that encode images and audio, in parallel with steps [as --threads]", low=1, high=512
    )
    media_cache: int = flag(
        256,
        "maximum size of encoded images and audio kept for later prompts, in MiB; each single one must fit",
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
