"""Mutants of the agent worker: durable episodes, attempts, and the records that close them."""

from tests.simulation.mutants.mutant import Mutant

RUN = "services/agent/episode_run.py"
ATTEMPT = "services/agent/attempt.py"
SHARD = "services/agent/shard.py"
EARLY_ANSWERS = "services/agent/early_answers.py"
RECORDS = "services/agent/records.py"
SCORES = "services/agent/teacher_scores.py"

OF_AGENTS = (
    Mutant(
        name="files_of_an_earlier_attempt_kept",
        sentence="Only the files of the attempt that counts come out of an episode.",
        file="services/agent/episode.py",
        old="        self.files = AttemptFiles()\n",
        new="        self.files = started.__dict__.setdefault('files', AttemptFiles())\n",
        caught_by=("that its attempt did not give out", "more than"),
        faults=("files", "sandbox", "environment fails"),
    ),
    Mutant(
        name="files_not_collected_and_rewarded",
        sentence="An episode whose files can't be collected has no reward.",
        file="services/agent/attempt.py",
        old="""\
        if failure is not None:
            raise AttemptFailed(failure)
        return answer
""",
        new="        return answer\n",
        caught_by=("its files were not collected",),
        faults=("files", "environment fails"),
    ),
    Mutant(
        name="recorded_answers_unused",
        sentence="A new owner runs an episode's coroutine with the recorded answers.",
        file=EARLY_ANSWERS,
        old="for answer in self._pop(key):\n            answers",
        new="for answer in ():\n            answers",
        caught_by=("excuses that", "I2: "),
    ),
    Mutant(
        name="last_answer_wins",
        sentence="If two records have the same id, readers use the first one.",
        file=EARLY_ANSWERS,
        old="answers.setdefault(answer.attempt, {}).setdefault(answer.call, answer)",
        new="answers.setdefault(answer.attempt, {})[answer.call] = answer",
        caught_by=("excuses that", "I2: "),
        faults=("kill", "agent", "inference"),
    ),
    Mutant(
        name="last_outcome_wins",
        sentence="A TaskEnded holds the first outcome of each sample, in log order.",
        file=SHARD,
        old="        task.outcomes.setdefault(outcome.sample, outcome)\n",
        new="        task.outcomes[outcome.sample] = outcome\n",
        caught_by=("is not the one that counts", "two TaskEnded that differ"),
        faults=("expel",),
    ),
    Mutant(
        name="own_outcomes_not_read_back",
        sentence="TaskEnded is built only from outcomes read back in log order.",
        file=SHARD,
        old="            run = EpisodeRun(self._send, ",
        new="""\
            async def own(event: Any) -> Any:
                ref = await self._send(event)
                if isinstance(event, EpisodeEnded):
                    self._on_outcome(event)
                return ref

            run = EpisodeRun(own, """,
        caught_by=("is not the one that counts", "two TaskEnded that differ"),
        faults=("expel",),
    ),
    Mutant(
        name="outcomes_of_the_past_forgotten",
        sentence="An episode whose outcome is in the log is not run again.",
        file=SHARD,
        old="            outcomes = self._early_ends.take_outcomes(event.task)\n",
        new="            outcomes = {}\n",
        caught_by=("I1: ", "I2: ", "I8: "),
    ),
    Mutant(
        name="task_closed_early",
        sentence="A task ends once every sample's outcome is in the log.",
        file=SHARD,
        old="len(task.outcomes) < task.submitted.samples",
        new="len(task.outcomes) < 1",
        caught_by=("I1: ", "I8: "),
        faults=(),
    ),
    Mutant(
        name="outcome_without_its_trajectory",
        sentence="The end: trajectory delivered, then the outcome that names it.",
        file=RUN,
        old="            ref = await self._record_trajectory(ending, earned)\n",
        new="            await self._record_trajectory(ending, earned)\n",
        caught_by=("without a trajectory",),
        faults=(),
    ),
    Mutant(
        name="attempts_not_counted",
        sentence="Attempts are bounded.",
        file=RUN,
        old="if not failure.retryable or number + 1 >= self.started.submitted.attempts:",
        new="if not failure.retryable:",
        caught_by=("attempts of", "I8: "),
        faults=("environment fails", "engine fails"),
    ),
    Mutant(
        name="failed_attempt_goes_on",
        sentence="What the infrastructure caused is never a reward.",
        file=ATTEMPT,
        old='if answer.failure is not None and answer.failure.origin != "policy":',
        new='if answer.failure is not None and answer.failure.origin == "policy":',
        caught_by=("excuses that", "I6: ", "I2: "),
        faults=("environment fails", "engine fails"),
    ),
    Mutant(
        name="failed_rewarded_0",
        sentence="What failed has no reward, not even 0.",
        file=RECORDS,
        old="        return EarnedReward(parts=episode.rewards)\n",
        new="        return EarnedReward(0.0, episode.rewards)\n",
        caught_by=("I6: ",),
        faults=("environment fails", "engine fails", "environment hangs"),
    ),
    Mutant(
        name="score_asked_again_under_its_call",
        sentence="A failed score is asked again under a call of its own: the first answer counts.",
        file=SCORES,
        old='call=f"{self.last}.score{number}",',
        new='call=f"{self.last}.score0",',
        caught_by=("I2: ", "I8: "),
        faults=("engine fails", "teacher"),
    ),
    Mutant(
        name="unscored_episode_rewarded",
        sentence="An episode that its teacher did not score is not trained on.",
        file=RUN,
        old="            ending, failure = stopped\n",
        new="            pass\n",
        caught_by=("I3: ",),
        faults=("engine fails", "debate", "teacher"),
    ),
    Mutant(
        name="overflowing_turn_lost",
        sentence="The turn that fills the context is recorded, so that it gets its penalty.",
        file="services/agent/episode.py",
        old='if answer.finish == "overflow" and not answer.tokens:',
        new='if answer.finish == "overflow":',
        caught_by=("I2: ",),
        faults=("limits",),
    ),
    Mutant(
        name="masked_not_stated",
        sentence="An episode that a limit cut is masked, if the recipe says so.",
        file=RECORDS,
        old='masked=cut and setup.settings.overlong == "mask"',
        new="masked=False",
        caught_by=("is not masked",),
        faults=("limits",),
    ),
    Mutant(
        name="timeouts_counted_unasked",
        sentence="A step that took too long is rewarded only if the recipe says so.",
        file=RECORDS,
        old='if failure.code == STEP_TIMEOUT and settings.timeouts == "unfinished":',
        new="if failure.code == STEP_TIMEOUT:",
        caught_by=("I6: ",),
        faults=("limits",),
    ),
    Mutant(
        name="exceptions_counted_unasked",
        sentence="An exception of the user's code is rewarded only if the recipe says so.",
        file=RECORDS,
        old='return "exception" if raised and settings.exceptions == "unfinished" else None',
        new='return "exception" if raised else None',
        caught_by=("I6: ",),
        faults=("limits",),
    ),
    Mutant(
        name="limits_worth_running_into",
        sentence="An episode at a limit has at most `unfinished_reward`.",
        file=RECORDS,
        old="reward = highest if reward is None else min(reward, highest)",
        new="reward = highest if reward is None else max(reward, highest)",
        caught_by=("I6: ",),
        faults=("limits",),
    ),
    Mutant(
        name="staleness_by_the_newest_token",
        sentence="Staleness counts from a sample's oldest token.",
        file="services/agent/turns.py",
        old="oldest_version=min(\n            (one.oldest_version for one in spoken if not",
        new="oldest_version=max(\n            (one.oldest_version for one in spoken if not",
        caught_by=("I5: ",),
        faults=(),
    ),
    Mutant(
        name="context_without_the_prompts_ids",
        sentence="Contexts are token ids, append-only: prompts' ids belong to them.",
        file="services/agent/conversation.py",
        old="self.parts += (answer.prompt_added, answer.tokens)",
        new="self.parts += (answer.tokens,)",
        caught_by=("excuses that", "I2: "),
        faults=(),
    ),
    Mutant(
        name="deadline_not_enforced",
        sentence="An owned episode always ends: at its deadline, if not before.",
        file=RUN,
        old="return max(0.0, self.started.deadline / 1000 - now())",
        new="return 1e6",
        caught_by=("I8: ",),
        faults=("environment hangs",),
    ),
    Mutant(
        name="end_of_an_agent_unnoticed",
        sentence="An episode goes on when its agent ends, not only at its deadline.",
        file="services/agent/memory/lone_agent.py",
        old="        agent.add_done_callback(go_on, context=self._trace)\n",
        new="",
        caught_by=("I1: ", "I2: ", "I8: ", "excuses that"),
        faults=(),
    ),
    Mutant(
        name="older_attempts_answers_taken",
        sentence="An answer to an older attempt is ignored.",
        file=RUN,
        old="""\
        if answer.attempt < self.attempt:
            return
        self._attempt(answer.attempt).take(answer)
""",
        new="        self._current.take(answer)\n",
        caught_by=("I2: ", "excuses that"),
        faults=("engine fails", "engine slow", "debate"),
    ),
    Mutant(
        name="other_meanings_accepted",
        sentence="An answer to another digest means a new attempt.",
        file=ATTEMPT,
        old="if not isinstance(answer, kind) or answer.digest != digest:",
        new="if not isinstance(answer, kind):",
        caught_by=("did something else", "I2: "),
        faults=("kill", "agent moody", "agent", "aimed"),
    ),
    Mutant(
        name="strays_not_closed",
        sentence="An environment that answers to an episode that is over is closed by its owner.",
        file=SHARD,
        old="        if over := self",
        new="        if False and self",
        caught_by=("I8: ",),
        faults=("cancel", "agent", "kill"),
    ),
    Mutant(
        name="second_environment_left_open",
        sentence="If an attempt has two environments, the one that answers second is closed.",
        file=SHARD,
        old="if other or (answer.partition >= 0 and answer.attempt < run.attempt):",
        new="if False:",
        caught_by=("I7: ",),
        faults=("kill", "agent"),
    ),
    Mutant(
        name="actions_go_where_the_reset_was_sent",
        sentence="An attempt's environment is the one whose answer is first in the log.",
        file="services/agent/routing/episode_locations.py",
        old="self._answered.get(attempt) or self._sent.get(attempt)",
        new="self._sent.get(attempt) or self._answered.get(attempt)",
        caught_by=("excuses that", "I2: ", "I7: "),
        faults=("kill", "agent"),
    ),
    Mutant(
        name="steps_to_whoever_is_free",
        sentence="All actions of an attempt go where its environment is.",
        file=SHARD,
        old='        if action.kind == "score":\n',
        new='        if action.kind in ("score", "step"):\n',
        caught_by=("excuses that", "I2: "),
        faults=(),
    ),
)
