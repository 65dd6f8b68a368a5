"""The endpoint agents call: `app.Gateway` puts the parts together; read `exchange.py` for one call from end to end."""
