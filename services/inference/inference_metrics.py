"""The metrics of an inference worker."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)

ANSWERS = Counter(
    "headrace_generations_total", "Prompts answered, by outcome.", ["policy", "finish"]
)
TOKENS = Counter("headrace_tokens_total", "Tokens of answered prompts.", ["policy", "kind"])
QUEUE_SECONDS = Histogram(
    "headrace_generation_queue_seconds",
    "Seconds that a prompt waited for a slot.",
    ["policy"],
    buckets=_SECONDS,
)
RUN_SECONDS = Histogram(
    "headrace_generation_run_seconds",
    "Seconds from a prompt's slot to its last token.",
    ["policy"],
    buckets=_SECONDS,
)
BUSY = Gauge("headrace_slots_busy", "Slots in use.", ["policy"])
SLOTS = Gauge("headrace_slots", "Slots that the worker may use now.", ["policy"])
VERSION = Gauge("headrace_policy_version_served", "The version that the worker serves.", ["policy"])
LOADS = Counter(
    "headrace_weight_loads_total",
    "Attempts to load a version, by result: loaded or failed.",
    ["policy", "result"],
)


class PolicyMetrics:
    """The metrics of one policy."""

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self.prompt_tokens = TOKENS.labels(policy, "prompt")
        self.generated_tokens = TOKENS.labels(policy, "generated")
        self.scored_tokens = TOKENS.labels(policy, "scored")
        self.queue_seconds = QUEUE_SECONDS.labels(policy)
        self.run_seconds = RUN_SECONDS.labels(policy)
        self.busy = BUSY.labels(policy)
        self.slots = SLOTS.labels(policy)
        self.version = VERSION.labels(policy)
        self.loaded = LOADS.labels(policy, "loaded")
        self.load_failed = LOADS.labels(policy, "failed")

    def answered(self, finish: str) -> None:
        """Counts an answer by its finish reason, or by the code of its failure."""
        ANSWERS.labels(self._policy, finish).inc()
