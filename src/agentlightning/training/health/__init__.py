"""The health of a training run: the signs that it learns nothing or breaks, and what the run does about them."""
