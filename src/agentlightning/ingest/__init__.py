"""Takes in spans that other programs send: OTLP traces and events of agents."""
