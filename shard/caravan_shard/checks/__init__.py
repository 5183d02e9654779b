"""Checks every command before anything changes."""
