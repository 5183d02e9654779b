"""Conversations: their items, and ways to rewind, shift, edit and move them."""
