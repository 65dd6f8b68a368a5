"""Serves calls whose provider speaks another dialect than the caller."""
