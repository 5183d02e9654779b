"""TGI's API: generation, tokens and what `/info` tells."""
