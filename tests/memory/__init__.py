"""The in-memory twin of the Kafka client, for simulation and unit tests."""
