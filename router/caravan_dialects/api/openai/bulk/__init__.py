"""Files and batches as OpenAI has them."""
