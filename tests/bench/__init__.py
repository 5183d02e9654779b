"""``make bench``: compares Caravan with llama-server on servers that have been in use. Not part of the test suite.

All servers of a comparison are resident at the same time and are loaded in turn, so that a machine that becomes slower
affects all of them equally.
"""
