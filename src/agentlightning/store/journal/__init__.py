"""A store with a write-ahead journal, for producers that record more often than a disk can sync."""
