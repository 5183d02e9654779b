"""Turns the bytes of tokens into the text that a client sees: UTF-8 decoding and stop strings."""
