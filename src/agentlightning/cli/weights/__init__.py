"""`agl weights`."""
