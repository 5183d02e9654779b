"""``make bench``: builds the peers from source and compares Caravan with them; no part of the test run."""
