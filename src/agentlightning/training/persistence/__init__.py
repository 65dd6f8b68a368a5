"""What a run keeps in its directory: state, settings, tasks and checkpoints."""
