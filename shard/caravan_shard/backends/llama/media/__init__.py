"""Images and audio: the projector, and the forward passes over what it gives."""
