"""One training run: its rollouts, updates and measurements, and what it keeps and reports."""
