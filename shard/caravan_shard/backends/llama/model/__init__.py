"""The model's file: its weights, facts, vocabulary and adapters."""
