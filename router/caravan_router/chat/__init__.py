"""Conversations to prompts, and a model's output to text and tool calls. Knows no HTTP."""
