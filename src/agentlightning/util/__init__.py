"""Small tools without knowledge of the domain: value types, settings files, progress, event loops, processes, files."""
