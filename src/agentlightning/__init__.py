"""Agent Lightning: train any AI agent."""
