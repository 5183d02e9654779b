"""Which requests belong to one job, when the next of them is expected, and what is kept for it."""
