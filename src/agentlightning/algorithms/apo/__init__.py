"""Prompt optimisation: APO edits prompt templates, tool descriptions and playbooks from what failed."""
