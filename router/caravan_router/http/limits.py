"""What a client may ask for at most."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Names and meaning are TGI's where TGI has them. None: as the model allows."""

    max_concurrent_requests: int = 128
    """Generations under way, queued ones included; one more is refused with 429."""
    max_best_of: int = 16
    """Of ``n`` and ``best_of``: candidates generated for one prompt."""
    max_stop_sequences: int = 4
    max_stop_bytes: int = 256
    """Of one stop string, in UTF-8: text may be held back for as long as it."""
    max_top_n_tokens: int = 5
    max_input_tokens: int | None = None
    max_total_tokens: int | None = None
    """Prompt and output."""
    max_prompt_bytes: int | None = None
    """Of one prompt, in UTF-8, checked before it is tokenized; None: 32 times the most tokens."""
    max_client_batch_size: int = 32
    """Prompts of one request."""
    max_embed_texts: int = 2048
    """Texts of one request for embeddings; OpenAI's limit. Each has at most as many tokens as the shards embed."""
    max_logit_biases: int = 300
    """Entries of one ``logit_bias``; OpenAI's limit."""
    max_constraint_bytes: int = 65_536
    """Of a JSON schema, a regular expression, a grammar or a list of choices, in UTF-8."""
    max_tools: int = 128
    """OpenAI's limit."""
    max_cache_salt_bytes: int = 256
    """In UTF-8."""
    max_request_new_tokens: int | None = None
    """Of all prompts and candidates of one request; None: ``max_best_of`` times what one may have."""
    payload_limit: int = 2_000_000
    """Bytes of a request's body, decompressed."""
    max_connections: int = 1000
    """Open at once, idle ones included; one more is told so and closed."""
    header_timeout_s: float = 20.0
    """From the start of a connection to the end of its first request's headers."""
    body_timeout_s: float = 60.0
    """From a request's headers to the end of its body."""
    slow_client_timeout_s: float = 30.0
    """A reader that takes nothing for so long is cut."""
    keep_alive_s: float = 15.0
    """A silent stream gets a comment so often."""
