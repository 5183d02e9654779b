"""The limits of a model in this process, where they are not those of a server."""

MAX_CANDIDATES = 256
MAX_STOPS = 64
