"""Training runs elsewhere that leave the calls of their policy to this server."""
