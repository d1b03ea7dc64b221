"""OpenEnv servers as environments: one session of a server's WebSocket is one episode."""
