"""The store over HTTP: the table of operations, and what client and server share to encode them."""
