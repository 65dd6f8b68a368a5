"""One update of a policy: the plan of its passes, the forward pass, the optimiser step."""
