"""What the router counts and measures."""
