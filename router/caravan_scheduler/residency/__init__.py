"""Decides which models are in memory: pure, as the scheduler of each model is."""
