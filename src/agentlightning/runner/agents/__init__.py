"""Forms of agents: how an agent or reward function is specified, loaded and called."""
