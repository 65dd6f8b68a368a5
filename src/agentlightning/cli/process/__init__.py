"""Process handling of the verbs: signals, child processes, and what the environment says and must not show."""
