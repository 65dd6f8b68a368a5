"""The contract over HTTP: api.py is the table that routes (rest.py, batches.py), OpenAPI document and client share."""
