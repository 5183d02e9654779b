"""OpenAI's routes under `/v1`, with the extra fields of vLLM and llama-server."""
