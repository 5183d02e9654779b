"""The routes that SageMaker and Vertex AI call."""
