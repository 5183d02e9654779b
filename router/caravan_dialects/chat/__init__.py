"""Turns conversations into prompts, and outputs into text and tool calls. Knows nothing of HTTP."""
