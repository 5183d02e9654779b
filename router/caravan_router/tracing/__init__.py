"""Traces of requests, sent to an OpenTelemetry collector. Only the exporter and the spans import OpenTelemetry."""
