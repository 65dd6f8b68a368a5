"""A Kubernetes Job for each attempt: the Job's manifest, the API server, and the agent that waits for its Job."""
