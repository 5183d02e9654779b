"""The routes that SageMaker and Vertex AI call, over the other dialects."""
