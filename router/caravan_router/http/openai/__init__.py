"""OpenAI's routes, with vLLM's extra fields."""
