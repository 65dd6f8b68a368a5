"""Builds the documentation site from docs/ and the READMEs that it links to: `make site`."""
