"""What a run says of itself: the result, the report, and the examination of its directory."""
