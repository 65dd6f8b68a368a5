"""Training from a store: recorded sessions as a training run, its result, and the reward before and after."""
