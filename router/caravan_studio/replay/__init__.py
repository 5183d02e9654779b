"""The command `caravan replay`: plays a recording again, as it was or as it would have been otherwise."""
