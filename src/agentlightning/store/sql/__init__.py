"""The store over a SQL database: SQLite in a file or in memory, PostgreSQL.

`store.py` implements the contract. What changes the database is a plain function of a transaction (`tx.py`), which the
committer runs in batches; what only reads is a function of a connection. SQL is written once, for both databases.
"""
