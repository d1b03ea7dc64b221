"""How a client authenticates: librdkafka's properties, for clients that are not librdkafka."""
