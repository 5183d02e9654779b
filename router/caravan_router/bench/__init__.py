"""The load generator ``caravan bench``, for any server with OpenAI's completions or TGI's streams."""
