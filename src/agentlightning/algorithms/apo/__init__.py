"""Prompt optimisation: APO edits prompt templates, tool descriptions and skills from what failed."""
