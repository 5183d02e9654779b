"""OpenAI's API, with the extra fields of vLLM and llama-server."""
