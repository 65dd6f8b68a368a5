"""The JSON of each page, a file for each family of pages. Every view is a function of the run that its path names, or
else of the catalog, and of the query."""
