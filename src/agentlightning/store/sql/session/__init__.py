"""What one batch of commands holds in memory: rows, savepoints, pending writes."""
