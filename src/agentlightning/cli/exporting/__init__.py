"""`agl export`: a run for other programs."""
