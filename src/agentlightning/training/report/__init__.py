"""What a run says of itself: the records of its steps, warnings, the reward curve and the result."""
