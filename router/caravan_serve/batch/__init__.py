"""`caravan batch`: the requests of a file, answered by a server's `/v1/batches`.

remote  the routes of files and batches
job     what is kept beside the output until it is whole, so that the same command goes on
cli     the command line, the progress bar, and the output in the order of the requests
"""
