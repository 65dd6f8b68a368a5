"""Texts under optimisation: candidates, placeholders, edits, playbooks."""
