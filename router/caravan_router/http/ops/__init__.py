"""Routes for monitoring and discovery: health, metrics, the API's description."""
