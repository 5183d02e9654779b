"""Who asks and how much they may: API keys from a file, and what each key has under way."""
