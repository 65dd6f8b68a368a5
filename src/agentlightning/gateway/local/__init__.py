"""Calls that our own engines answer: prompt, sampling, answer and record."""
