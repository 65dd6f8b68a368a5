"""The threads of a SQL store: group commit, queries, delivery of results."""
