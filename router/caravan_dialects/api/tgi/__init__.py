"""TGI's API: generation, tokens and `/info`."""
