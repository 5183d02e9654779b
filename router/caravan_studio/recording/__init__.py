"""Recordings of the events and decisions of schedulers, as files that are played again. By default without tokens."""
