"""Serves the page that browsers get at `/`."""
