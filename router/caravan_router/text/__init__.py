"""From the bytes of tokens to the text a client sees: UTF-8 decoding, stop strings, and the owner of a token stream."""
