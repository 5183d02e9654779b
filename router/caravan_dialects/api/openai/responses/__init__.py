"""OpenAI's responses: items to messages, outputs to items, and turns that continue what the store keeps."""
