"""What a scheduler does, as messages for those who watch: steps, the queue, who holds which cells, and no text."""
