"""Decodes image and audio files that clients send, in separate processes. Nothing is ever fetched."""
