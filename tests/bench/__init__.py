"""Benchmarks on a real local broker: `python -m tests.bench [NAME...]`. See docs/benchmarks.md.

Every figure comes from separate service processes, as in production, through a Kafka that runs
here, acks=all and idempotence on. Nothing here is a test: machines differ, and only ratios of one
run mean much.
"""
