"""Records what the user's own code does: sessions, written to a store in the background."""
