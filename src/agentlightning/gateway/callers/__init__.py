"""Who makes a call: the attempt, the agent, and whether the client repeats a request."""
