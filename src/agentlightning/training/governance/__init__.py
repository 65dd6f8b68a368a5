"""Governance of a run: checks of its rewards, the promotion gate, and the audit log of its versions."""
