"""Mutants of signatures: whose records count."""

from tests.simulation.mutants.mutant import FORGERIES, Mutant

PUBLICATIONS = "services/log/signatures.py"
REQUESTS = "services/log/request_signatures.py"
SCHEDULER = "services/scheduler/service.py"
REFUSED = "services/scheduler/refused_tasks.py"
KEYS = "schemas/untrusted/trusted_keys.py"

OF_SIGNATURES = (
    Mutant(
        name="unsigned_versions_count",
        sentence="A version counts only if a signer of the recipe signed it.",
        file=PUBLICATIONS,
        old="if not any(signed_by(signer, signature, message) for signer in signers):",
        new="if not signers:",
        caught_by=("I5: publication",),
        faults=FORGERIES,
    ),
    Mutant(
        name="older_versions_come_back",
        sentence="The numbers of signed records ascend, so a repeated one does not count.",
        file=PUBLICATIONS,
        old="if at and self._numbers[at - 1] >= number:",
        new="if at < 0:",
        caught_by=("I5: publication", "I8: quota"),
        faults=FORGERIES,
    ),
    Mutant(
        name="versions_of_other_namespaces_count",
        sentence="The signed bytes of a version contain the name of the topic.",
        file=PUBLICATIONS,
        old='f"{topic}\\n{number}\\n".encode()',
        new='f"{number}\\n".encode()',
        caught_by=("I5: publication",),
        faults=FORGERIES,
    ),
    Mutant(
        name="claimed_keys_believed",
        sentence="The key that a request names has signed it.",
        file=REQUESTS,
        old='return self.key if signed_by(self.key, self.signature, message) else ""',
        new="return self.key",
        caught_by=("I1: task", "I8: quota"),
        faults=FORGERIES,
    ),
    Mutant(
        name="requests_of_other_namespaces_count",
        sentence="The signed bytes of a request contain the name of the topic.",
        file=REQUESTS,
        old='topic.encode() + b"\\n" + digest',
        new="digest",
        caught_by=("I1: task", "I8: quota"),
        faults=FORGERIES,
    ),
    Mutant(
        name="every_known_key_acts_for_every_tenant",
        sentence="A key acts for the tenants that name it.",
        file=KEYS,
        old="key in self.operators or key in named:",
        new="key in self.keys:",
        caught_by=("I1: task",),
        faults=FORGERIES,
    ),
    Mutant(
        name="forged_tasks_take_ids",
        sentence="Ids of a tenant with keys are apart from those of others.",
        file=KEYS,
        old='return tenant if tenant in self.tenants else ""',
        new='return ""',
        caught_by=("I1: task",),
        faults=FORGERIES,
    ),
    Mutant(
        name="everybody_cancels",
        sentence="A cancellation counts for the tenants of its key.",
        file=KEYS,
        old="if every or key in keys]",
        new="]",
        caught_by=("is cancelled: True",),
        faults=FORGERIES,
    ),
    Mutant(
        name="forged_tasks_run",
        sentence="A task of a tenant with keys runs only if one of them has signed it.",
        file=SCHEDULER,
        old="        if unproved:\n            self._core.on_unproved(number)",
        new="        if unproved and number < 0:\n            self._core.on_unproved(number)",
        caught_by=("is not refused: tenant", "by nobody starts as"),
        faults=("requests",),
    ),
    Mutant(
        name="forged_cancellations_count",
        sentence="The scheduler believes the key that has signed a cancellation, and no other.",
        file=SCHEDULER,
        old="self._core.on_cancelled(event, delivery.signed_by(self._trusted.keys))",
        new='self._core.on_cancelled(event, next(iter(self._trusted.operators), ""))',
        caught_by=("nobody who may has asked for it",),
        faults=("requests",),
    ),
    Mutant(
        name="forged_tasks_crowd_in",
        sentence="Few tasks that no key has signed are open at a time.",
        file=REFUSED,
        old=" or self.live_unproved >= UNPROVED_LIVE",
        new="",
        caught_by=("that is open",),
        faults=("requests",),
    ),
    Mutant(
        name="refused_tasks_crowd_in",
        sentence="Few tasks that are not run are open at a time.",
        file=REFUSED,
        old=" or self.live >= REFUSED_LIVE",
        new="",
        caught_by=("is refused task",),
        faults=("requests",),
    ),
)
