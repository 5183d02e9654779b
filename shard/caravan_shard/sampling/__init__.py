"""Chooses tokens: one row of logits, the parameters and the history of a sequence give one token id.

May import `arrays` only. Must never hold a state that the tokens of the sequence cannot rebuild: the token at position
p depends on (seed, p), the logits and the tokens before p, and on nothing else. Preempting a sequence, computing it
again, moving it to another shard or batching it with others therefore changes nothing.
"""
