"""The event backbone for reinforcement learning of LLM agents, on Apache Kafka."""
