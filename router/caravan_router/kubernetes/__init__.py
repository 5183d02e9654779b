"""Follows the pods of a Service in Kubernetes, by the EndpointSlices that its API server tells."""
