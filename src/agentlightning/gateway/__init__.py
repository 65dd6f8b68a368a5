"""The endpoint agents call: `app.Gateway` puts the parts together; read `local/call.py` for one call from end to
end."""
