"""The model that learns: the policy, its settings, and its updates."""
