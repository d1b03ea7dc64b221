"""What the stream jobs export for Prometheus."""
