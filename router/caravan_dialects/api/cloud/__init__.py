"""The API that Vertex AI calls, over the other dialects."""
