"""Traces with OpenTelemetry; off unless a service has an OTLP endpoint."""
