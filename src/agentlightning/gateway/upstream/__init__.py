"""Providers and their servers: one call with its retries, rate limits, budgets, health and prices."""
