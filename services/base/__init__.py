"""The clock, the public types of agents and environments, plug-ins."""
