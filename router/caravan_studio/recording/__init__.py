"""Recordings of what schedulers heard and decided, as files that are played again. By default no token is in them."""
