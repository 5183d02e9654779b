"""Limits that both programs enforce: the router to answer its client, the shard because it trusts nobody."""

# The source of a JSON schema, a regular expression or a grammar, in UTF-8. Larger sources are programs rather than
# descriptions of an output.
MAX_CONSTRAINT_BYTES = 64 << 10
# Most logits lie within 30 of each other, so this bias bans a token or forces it.
MAX_BIAS = 100.0
MAX_STOP_TOKEN_IDS = 64
# The most --rollback-tokens that a shard has if drafts are asked for and the flag is not given. More take much memory,
# and the ends of long drafts are seldom right.
MOST_ROLLBACK_TOKENS = 8
# Tokens whose log probabilities an Evaluate returns after each output of a row.
MAX_SCORE_TOKEN_IDS = 256
# Texts that may end a thought; and the bytes of each, as well as the tokens that the shard writes to end one.
MAX_THOUGHT_CLOSINGS = 8
MAX_THOUGHT_MARKER = 128
# The content of a picture or of sound on its way to a shard: less than the most bytes of a message.
MAX_MEDIA_BYTES = 15 << 20
MAX_MEDIA_ID_BYTES = 64
# Pictures have sides, and sound has samples, from the first to the second number.
MEDIA_SIDES = (2, 4096)
MEDIA_SAMPLES = (400, MAX_MEDIA_BYTES // 4)
# The largest number of 16 bits. Of larger ones, a model could make some that are not finite.
MAX_EMBEDDING_VALUE = 65504.0
