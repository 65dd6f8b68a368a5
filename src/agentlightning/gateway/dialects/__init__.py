"""One module for each wire format: it reads requests into our shape and writes our answers back."""
