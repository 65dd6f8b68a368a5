"""Tasks to measure learning on: generated from a seed, with a known optimum, small enough for a tiny model."""
