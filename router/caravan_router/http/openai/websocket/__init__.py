"""WebSocket connections of ``/v1/responses``."""
