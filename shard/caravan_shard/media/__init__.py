"""Images and audio: what a backend's encoder makes of them, and the embeddings that the shard keeps."""
