"""What an agent does becomes spans of its attempt: `scope` (which attempt), `emit` (what is said), `tracer` (how it
travels), `otel` (its form)."""
