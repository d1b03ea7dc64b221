"""The invariants of a log, each file about one kind of record. Pure.

`log_report.py` judges deliveries from anywhere by them, `verify.py` reads those of a namespace.
They count again what the services did, without the services' code. Only what recipes may choose,
such as an advantage or a curator, is called as the services call it.
Of two records with one id the first counts; a duplicate is counted, and is no violation unless
its writer is fenced. What this can't see: the weights behind a digest, whether the code's own
story of an environment is true, and processes left over.

I1 each task and each episode has exactly one terminal record that counts; a task submitted twice
runs once. I2 a trajectory's turns are those that were asked for and generated, in the contexts
that they were asked in, none lost, doubled or of another attempt; an answer echoes its request.
I3 each sample is trained once as fresh, or dropped with a reason that holds; a batch's frontier
and `groups_read` are exact. I4 each version names its batch, and a skipped or resumed one says so
truly. I5 versions are contiguous, batch n trains version n; staleness, counted from the
trajectories' tokens, is within its bound; what evaluates is never trained on, and each of its
tokens is of the version that its start names. I6 no reward comes from an infrastructure failure,
and each reward is what an environment gave. I8 what was begun has come to its end. With one clock
for all records: starts keep the limits, and batches the prefetch.
"""
