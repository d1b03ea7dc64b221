"""Servers of OpenEnv as environments: a session of their WebSocket is an episode."""
