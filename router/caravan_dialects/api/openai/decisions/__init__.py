"""OpenAI's decisions: typed questions about one input, answered with probabilities and without generating text.

The input is one prefix, and each question a branch of it. A branch needs one row of logits: the probabilities of the
labels of its answers (`labels`). `prompts` makes the tokens, `probabilities` reads the rows, `reply` makes the answers.
"""
