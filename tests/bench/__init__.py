"""``make bench``: builds llama.cpp's servers and compares Caravan with them. Not part of the test suite."""
