"""Drafts tokens with the heads that a model has for the tokens after the next one."""
