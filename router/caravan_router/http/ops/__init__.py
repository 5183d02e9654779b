"""Routes for operators: health, metrics, the API's description."""
