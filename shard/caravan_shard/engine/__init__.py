"""The thread that owns the model, and what commands do there."""
