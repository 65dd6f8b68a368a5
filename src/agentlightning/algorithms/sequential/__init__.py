"""Several algorithms one after the other in one run: prompts first, then weights, or in turns."""
