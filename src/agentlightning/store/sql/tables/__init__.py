"""Tables, statements, and the interface that a database backend implements."""
