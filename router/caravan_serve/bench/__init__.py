"""The load generator ``caravan bench``, for any server with OpenAI's completions and embeddings or TGI's streams."""
