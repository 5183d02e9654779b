"""API keys from a file: who may send requests. What a key is and allows is in `caravan_dialects.auth`."""
