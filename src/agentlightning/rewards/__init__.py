"""Rewards from elsewhere: a service, a model that judges one rollout, a model that ranks a group of them."""
