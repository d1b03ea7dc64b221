"""One rank trains: `rank_memory.py RANK SIZE PORT POLICY TOKENS` prints the peak of its memory.

POLICY is JSON. Two updates are trained on sequences of so many TOKENS. What it prints are bytes
above those before the model was loaded. Set MALLOC_MMAP_THRESHOLD_, so that what torch frees is not
kept by the C library.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

from torch._C._distributed_c10d import TCPStore

from headrace.schemas.recipe.policy import Policy
from headrace.services.models.weights import model_folder
from headrace.trainer.learner import Learner
from headrace.trainer.ranks.rank_group import RankGroup, loopback_variables
from headrace.trainer.ranks.ranks import Ranks
from headrace.trainer.sequences import UpdateBatch
from tests.unit.operate.plan.test_memory_parts import sequences
from tests.unit.trainer.test_offload import resident

UPDATES = 2
"""The moments of AdamW are there from the second one on."""


def train(policy: Policy, ranks: Ranks, count: int, length: int) -> None:
    one = Learner(model_folder(policy.model), policy, ranks)
    update = UpdateBatch(sequences(count, length), 0)
    for _ in range(UPDATES):
        one.train([update])


def main() -> None:
    rank, size, port = map(int, sys.argv[1:4])
    policy, length = Policy.model_validate(json.loads(sys.argv[4])), int(sys.argv[5])
    assert policy.training is not None
    os.environ |= loopback_variables()
    store = TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    group = RankGroup(store, rank, size, 300, "cpu")
    # Code is loaded when it is first used.
    train(policy.model_copy(update={"model": "tiny-llama"}), group.ranks, 2 * size, length)
    gc.collect()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again (Linux's proc(5)).
    # Two micro-batches for each rank, so that gradients add up.
    train(policy, group.ranks, 2 * size * policy.training.max_tokens // length, length)
    print(resident("VmHWM") - before)
    group.close()


if __name__ == "__main__":
    main()
