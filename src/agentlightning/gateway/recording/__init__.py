"""From a request and its response to the span that the store keeps."""
