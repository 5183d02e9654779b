"""Load generator behind ``caravan bench``: drives any server with OpenAI completions or TGI streams, and measures."""
