"""Follows the pods of a Service in Kubernetes, by the EndpointSlices of its API server."""
