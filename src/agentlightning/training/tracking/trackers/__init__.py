"""The trackers, one file each, imported by name where a run uses it."""
