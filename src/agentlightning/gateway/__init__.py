"""The gateway: the model API that agents call. `app` wires it; read `endpoints` and `local/call.py` for one call."""
