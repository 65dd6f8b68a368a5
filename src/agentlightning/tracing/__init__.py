"""Records what an agent does as spans of its attempt: the current scope, `emit_*`, the tracer and OTLP."""
