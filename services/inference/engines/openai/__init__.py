"""The engine that asks a server with OpenAI's API."""
