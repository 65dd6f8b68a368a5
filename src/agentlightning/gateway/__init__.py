"""The gateway: the model API that agents call. `app` has its parts and routes; read `local.py` for one call."""
