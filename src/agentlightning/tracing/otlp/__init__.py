"""OTLP: spans to and from OpenTelemetry's formats, and their export to an OTLP endpoint."""
