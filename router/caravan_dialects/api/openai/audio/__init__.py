"""``/v1/audio``: transcribes audio."""
