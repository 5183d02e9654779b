"""The API's documentation: examples for each operation, and the page at `/docs` that shows and sends them."""
