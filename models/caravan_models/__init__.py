"""Models by name: what a name means, which files of a hub's repository it needs, and how they get into the cache."""
