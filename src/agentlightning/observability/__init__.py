"""What a server reports about itself: logs, and metrics for Prometheus."""
