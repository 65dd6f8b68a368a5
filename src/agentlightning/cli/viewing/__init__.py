"""The verbs that show runs: as a web page, as a report."""
