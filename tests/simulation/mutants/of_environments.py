"""Mutants of the env and inference workers."""

from tests.simulation.mutants.mutant import Mutant

HANDLE = "services/env/handle.py"
SHARD = "services/env/shard.py"

OF_ENVIRONMENTS = (
    Mutant(
        name="digest_not_echoed",
        sentence="Requests carry a digest of their meaning that answers echo.",
        file="services/env/answers.py",
        old="        digest=action.digest,\n",
        new="        digest=bytes(16),\n",
        caught_by=("to another meaning",),
        faults=(),
    ),
    Mutant(
        name="file_named_before_it_is_stored",
        sentence="A file is in the blob store before the observation that names it.",
        file="services/tasks/artifact_store.py",
        old='        blob = self._blobs.put(data, mimetypes.guess_type(name)[0] or "")\n',
        new='        blob = describe(data, "")\n',
        caught_by=("a file that is not stored",),
        faults=("files",),
    ),
    Mutant(
        name="repeated_action_run_again",
        sentence="A repeated action is answered again from the last observation.",
        file=HANDLE,
        old="""\
        if self._last is not None and action.call == self._last.call:
            await self._answer(self._last)
            return
        if action.index <= self._done:
            return
        await self._compare(environment, action)
        if self._broken is None and action.index != self._done + 1:
""",
        new="        if self._broken is None and action.index > self._done + 1:\n",
        caught_by=("excuses that", "I2: ", "I6: "),
        faults=("repeat", "kill"),
    ),
    Mutant(
        name="own_answers_acted_on",
        sentence="An environment goes on from the answer that counts: the first in the log.",
        file=HANDLE,
        old="        await self._compare(environment, action)\n",
        new="",
        caught_by=("I2: ",),
        faults=("expel", "sandbox", "env"),
    ),
    Mutant(
        name="environment_not_rebuilt",
        sentence="A replayable environment is rebuilt by re-stepping its recorded actions.",
        file=HANDLE,
        old="""\
            observation = await self._act(environment, action)
            if shown(observation) != recorded:
""",
        new="""\
            observation = failed(action, self._instance, None)
            if recorded != recorded:
""",
        caught_by=("excuses that", "I2: "),
    ),
    Mutant(
        name="rebuilt_environment_not_compared",
        sentence="A rebuilt environment is compared with what was observed.",
        file=HANDLE,
        old="            if shown(observation) != recorded:\n",
        new="            if recorded != recorded:\n",
        caught_by=("excuses that", "I2: "),
        faults=("kill", "sandbox", "lies"),
    ),
    Mutant(
        name="failure_rewarded_0",
        sentence="An environment raises InfrastructureError, never rewards it.",
        file=HANDLE,
        old="""\
            self._broken = failure_of(self._late(action.kind, environment) if late else error)
            return failed(action, self._instance, self._broken, self._claim.partition)
""",
        new="""\
            zero = failed(action, self._instance, None)
            return zero.model_copy(update={"reward": 0.0, "terminated": True})
""",
        caught_by=("excuses that", "I2: ", "I6: "),
        faults=("environment fails",),
    ),
    Mutant(
        name="failure_with_a_reward",
        sentence="What the infrastructure caused is never a reward.",
        file=HANDLE,
        old="return failed(action, self._instance, self._broken, self._claim.partition)",
        new="""\
zero = failed(action, self._instance, self._broken, self._claim.partition)
            return zero.model_copy(update={"reward": 0.0})""",
        caught_by=("I6: observation",),
        faults=("environment fails",),
    ),
    Mutant(
        name="open_environments_committed",
        sentence="A reset is held until its environment ends.",
        file=SHARD,
        old="self._open(delivery, self._context.hold(delivery, long=True)).put(action)",
        new="self._open(delivery, lambda: None).put(action)",
        caught_by=("I1: ", "I2: ", "I8: "),
    ),
    Mutant(
        name="answers_without_a_place",
        sentence="An answer says in which partition its environment is.",
        file="services/env/answers.py",
        old="        partition=partition,\n    )\n    # The log",
        new="        partition=-1,\n    )\n    # The log",
        caught_by=("excuses that", "I2: ", "I7: "),
        faults=("kill", "agent"),
    ),
    Mutant(
        name="scores_done_before_their_answers",
        sentence="A record is done only if nobody holds it but for long.",
        file="services/worker/shard_host.py",
        old="        done = self._next_offset if brief is None else brief\n",
        new="        done = self._next_offset\n",
        caught_by=("I8: ", "I1: "),
        faults=("kill", "debate", "env"),
    ),
    Mutant(
        name="prompt_done_before_its_answer",
        sentence="A prompt is held until its answer is durable.",
        file="services/inference/shard.py",
        old="        self._holds[prompt_id] = [self._context.hold(delivery)]\n",
        new="        self._holds[prompt_id] = [lambda: None]\n",
        caught_by=("I1: ", "I8: "),
        faults=("kill", "inference"),
    ),
    Mutant(
        name="handed_over_prompt_not_sent",
        sentence="A draining worker is done with a prompt once another one has it.",
        file="services/inference/drain.py",
        old="        await self._log.send(request, at, awaited=True)\n",
        new="",
        caught_by=("I1: ", "I8: "),
        faults=("restart", "inference"),
    ),
    Mutant(
        name="expired_prompt_silently_dropped",
        sentence="What has expired is dropped with a typed error.",
        file="services/inference/serving.py",
        old="        except InfrastructureError as error:\n",
        new="""\
        except InfrastructureError as error:
            if error.code == "expired":
                return None
""",
        caught_by=("I8: ",),
        faults=("clock", "inference"),
    ),
    Mutant(
        name="close_ignored",
        sentence="An environment ends by `close`, and gives its slot back.",
        file=SHARD,
        old="                handle.end()\n        elif action.environment.use",
        new="                pass\n        elif action.environment.use",
        caught_by=("excuses that", "I8: "),
        faults=(),
    ),
)
