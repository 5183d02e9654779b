"""The domain types that every room of the router uses. Imports nothing of ours."""
