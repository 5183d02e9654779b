"""Routes of OpenAI's conversations, and Caravan's own to fork, rewind, shift, edit and move them."""
