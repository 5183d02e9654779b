"""Chooses tokens: one row of logits, the parameters and the history of a sequence give one token id.

May import `arrays` and caravan_proto only. Must never hold a state that neither the tokens of the sequence nor its
`feedback` value can rebuild: the token at position p depends on (seed, p), the logits, the tokens before p and the
value that came with the last of them, and on nothing else. Preempting a sequence, computing it again, moving it to
another shard or batching it with others therefore changes nothing.
"""
