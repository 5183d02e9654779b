"""What all generating routes share, from permits to the tokens of a run."""
