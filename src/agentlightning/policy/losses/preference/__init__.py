"""Losses that compare whole sequences: DPO, IPO, KTO, SimPO."""
