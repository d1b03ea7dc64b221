"""Environments of libraries that block, compute for long, or run what the policy wrote.

Each library runs in a child process of the env worker, with limits on time and memory.
"""
