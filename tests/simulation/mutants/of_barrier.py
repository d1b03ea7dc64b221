"""Mutants of several policies and of the barrier between them."""

from tests.simulation.mutants.mutant import SCHEDULES, Mutant

ROOM = "services/scheduler/policy_room.py"
BARRIER = "stream_jobs/barrier.py"
COUNTED = "stream_jobs/counted_samples.py"
RULE = "schemas/version_barrier.py"

OF_BARRIER = (
    Mutant(
        name="one_version_too_far",
        sentence="A policy is at most `barrier.versions` ahead of the slowest one of its set.",
        file=RULE,
        old="return published is None or version - published > versions",
        new="return published is None or version - 1 - published > versions",
        caught_by=("is at",),
        faults=SCHEDULES,
    ),
    Mutant(
        name="nobody_passed_at_the_end",
        sentence="A policy without work left does not hold the others.",
        file=BARRIER,
        old="waits = now_s < quiet_s or any(",
        new="waits = True or any(",
        caught_by=("has decided",),
        faults=SCHEDULES,
    ),
    Mutant(
        name="passed_while_a_group_waits",
        sentence="A policy has work while a group of it is undecided.",
        file=BARRIER,
        old="in_flight or undecided or any",
        new="in_flight or any",
        caught_by=("is at",),
        faults=SCHEDULES,
    ),
    Mutant(
        name="passed_while_a_batch_is_trained",
        sentence="A policy has work while a batch of it is not published.",
        file=BARRIER,
        old="self.published is None or self.batch > self.published",
        new="self.published is None",
        caught_by=("is at",),
        faults=SCHEDULES,
    ),
    Mutant(
        name="held_policy_holds_back_tasks",
        sentence="A policy that waits at the barrier does not hold back new tasks.",
        file=ROOM,
        old="not policy.has_closed(most) if name in held else policy.room > 0",
        new="policy.room > 0",
        caught_by=("tasks wait for",),
        faults=SCHEDULES,
    ),
    Mutant(
        name="groups_pile_up_at_the_barrier",
        sentence="No task starts while enough full batches of a policy wait at the barrier.",
        file=ROOM,
        old="not policy.has_closed(most) if name in held else policy.room > 0",
        new="name in held or policy.room > 0",
        caught_by=("a task starts while",),
        faults=SCHEDULES,
    ),
    Mutant(
        name="barrier_not_kept",
        sentence="A batch waits until the others of its set have followed.",
        file=BARRIER,
        old="        if not behind:\n            return False",
        new="        if True:\n            return False",
        caught_by=("is ahead of",),
        faults=("barrier", "kill", "trainer"),
    ),
    Mutant(
        name="another_policys_groups_are_batched",
        sentence="A batch holds groups of its own policy, and not those that the barrier reads.",
        file="stream_jobs/assemble_batches.py",
        old="if isinstance(event, GroupClosed) and event.policy in barrier.others:",
        new="if isinstance(event, GroupClosed) and not event.policy:",
        caught_by=("I3: ", "I5: ", "I6: "),
        faults=("barrier",),
    ),
    Mutant(
        name="drawn_from_more_than_is_decided",
        sentence="A batch that draws from groups that piled up decides all that it draws from.",
        file="stream_jobs/batches.py",
        old="if len(list(fitting(everything))) == len(everything):",
        new="if everything:",
        caught_by=("I9: batch",),
        faults=("barrier", "limits"),
    ),
    Mutant(
        name="a_role_learns_from_all_rewards",
        sentence="A role with a reward of its own learns from that one.",
        file=COUNTED,
        old="reward = role_reward(outcome, role) if role else outcome.reward",
        new="reward = outcome.reward",
        caught_by=("has other advantages",),
        faults=("several",),
    ),
    Mutant(
        name="a_policy_gets_the_reward_of_another",
        sentence="A policy's reward is the mean of the roles that it plays itself.",
        file="schemas/role_rewards.py",
        old="for use in event.policies if use.policy == policy]",
        new="for use in event.policies]",
        caught_by=("its policy's is",),
        faults=("several",),
    ),
    Mutant(
        name="tokens_of_another_policy_count",
        sentence="A policy is trained on the turns that it took itself.",
        file=COUNTED,
        old="uses = [use for use in outcome.policies if use.policy == policy]",
        new="uses = list(outcome.policies)",
        caught_by=("states tokens", "its policy's is"),
        faults=("several",),
    ),
)
