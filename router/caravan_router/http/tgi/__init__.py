"""TGI's routes: generation, tokens and `/info`."""
