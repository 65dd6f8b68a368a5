"""The verbs that learn from recorded data."""
