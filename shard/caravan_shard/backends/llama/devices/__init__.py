"""Which devices hold what of a model, and whether they have room for it."""
