"""Access to the log. Only this package imports `confluent_kafka`."""
