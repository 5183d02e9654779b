"""TGI's routes."""
