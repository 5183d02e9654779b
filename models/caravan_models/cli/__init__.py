"""The commands `caravan pull`, `list`, `show` and `rm`."""
