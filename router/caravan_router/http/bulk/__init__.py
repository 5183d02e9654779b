"""Files and batches, in the forms of OpenAI and Anthropic, and the task that answers the lines of batches."""
