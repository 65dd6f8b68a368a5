"""The store contract over a SQL database.

store.py implements the contract. Its commands (commands/) run in the threads of execution/, on a unit of work
(session/), by the rules of lifecycle/. spans/ encodes spans. tables/ has the statements and the interface of a backend,
which sqlite/ and postgres/ implement.
"""
