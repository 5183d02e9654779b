"""Routes of OpenAI's responses."""
