"""Names of the 0.x API whose work other parts do here: adapters, hooks, a store server, a runner, algorithms."""
