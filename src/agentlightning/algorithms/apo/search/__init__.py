"""Searches: how candidates are proposed, tried and chosen; one file each."""
