"""Programs that make parts of the repository: the documentation site and the reference."""
