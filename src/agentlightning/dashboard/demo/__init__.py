"""Made-up runs for `agl dashboard --demo`: every page has something to show, and nothing was trained."""
