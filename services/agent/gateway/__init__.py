"""OpenAI's API for agents that run outside Headrace."""
