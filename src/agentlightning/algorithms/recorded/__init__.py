"""Recorded data as algorithms learn from it: sessions of a store, conversations, filters and pairs."""
