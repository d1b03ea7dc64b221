"""Environments of libraries that block, compute long, or run what a policy wrote: each library in a
child process of the env worker, with bounds on time and memory."""
