"""OpenAI's conversations, and Caravan's ways to fork, rewind, shift, edit and move them."""
