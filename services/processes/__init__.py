"""Child processes that end with their parent and leave nothing behind, and containers.

A `ChildProcess` is any command. It runs under a guard, a small process that kills whatever the
command started. A command that is a module of ours calls `take_pipes`. A `ProgramStarter` starts
the same program again and again.
"""
