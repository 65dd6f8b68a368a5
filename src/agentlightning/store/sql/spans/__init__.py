"""Spans in a SQL database: encoding, validation, token blocks, queries."""
