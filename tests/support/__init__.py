"""Servers, models and fakes that tests and benchmarks share."""
