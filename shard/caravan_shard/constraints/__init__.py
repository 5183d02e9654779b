"""Outputs that have to match a JSON schema, a regular expression or a grammar."""
