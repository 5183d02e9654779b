"""A simulator of fleets: real schedulers against shards that are played in virtual time."""
