"""From token bytes to text a client may see: incremental UTF-8, stop strings, one owner of the stream."""
