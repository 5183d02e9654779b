"""OpenAI's routes under `/v1`."""
