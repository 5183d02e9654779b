"""What generating requests of all dialects share: checks, prompts, constraints, generations and replies."""
