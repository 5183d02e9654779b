"""Ollama's routes under `/api`."""
