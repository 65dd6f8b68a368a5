"""The JSON of each page, a file for each family of pages. Every view is a function of the catalog and the query."""
