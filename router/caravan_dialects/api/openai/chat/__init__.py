"""Chat completions: messages to a prompt, outputs to text and tool calls."""
