"""Servers of tools that speak MCP: each is spoken to by a process of its own."""
