"""Kafka ACLs for the roles of a run."""
