"""Makes the pages of the reference from the code: for the site, the tests, and `make reference`."""
