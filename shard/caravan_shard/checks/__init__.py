"""Checks every command before anything changes.

May import `sequences` and below. A check never changes a sequence, and trusts nobody: every number of a command is
compared with its range and with what the shard holds. A refusal is a value with a stable code.
"""
