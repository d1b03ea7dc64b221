"""The contract between services: events, topics, the Avro codec, packed arrays."""
