"""The wire formats: one dialect for each reads requests, writes replies and reads what providers answer."""
