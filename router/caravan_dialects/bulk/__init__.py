"""Files that clients upload, and batches: the lines of such a file, each a request, answered when there is room.

`store` keeps both, in a folder: contents of files as files, all else in SQLite. A batch is written when it is made, its
lines when they are checked (`lines`), and each answer before it counts, so that a server that is killed goes on with
the lines that have no answer: each is answered once. When all are, the answers become the output file and the error
file, in the order of the lines.

Lines are worked off in an order in which neighbours have long common prefixes, which are computed once.
"""
