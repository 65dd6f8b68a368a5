"""Calls whose provider speaks another dialect than the caller: requests and answers are translated."""
