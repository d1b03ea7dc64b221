"""Chaos on a real broker: the services as processes, faults of many kinds, the checker at the end.

    python -m tests.chaos --seconds 120 --seed 7

Each round mixes kinds of faults (`injections.py`) for some seconds each, at times none; then all
is healed, and the backlog must drain. Every third round kills one worker at a time and waits for
its successor: the gap that a user sees. At the end the log is read whole and judged. What is not
tried here: power loss (a killed broker's page cache survives), and faults of the schema registry.
"""
