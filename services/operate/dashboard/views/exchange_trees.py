"""Requests and answers as JSON values, and as hops on a timeline."""

from __future__ import annotations

from headrace.schemas.events import (
    ActionRequested,
    GenerationCompleted,
    GenerationRequested,
    ObservationRecorded,
)
from headrace.services.base.texts import encodable
from headrace.services.log.unpacked import versions_in
from headrace.services.operate.dashboard.index.tool_calls_read import has_failed
from headrace.services.operate.dashboard.views.cut_texts import (
    Tree,
    artifact_tree,
    failure_tree,
    text_tree,
)
from headrace.services.operate.show.task_story import Exchange


def add_request(tree: Tree, event: GenerationRequested | ActionRequested, location: str) -> None:
    """Adds what is known of a request."""
    tree["kind"] = event.kind
    if isinstance(event, GenerationRequested):
        name = "chat" if event.chat else "text"
        tree |= {"what": event.policy, "context_tokens": len(event.tokens) // 4}
        tree["request"] = text_tree(getattr(event, name), location, name)
    else:
        tree |= {"what": encodable(event.environment.use), "index": event.index}
        tree["request"] = text_tree(event.payload, location, "payload")


def add_answer(
    tree: Tree,
    event: GenerationCompleted | ObservationRecorded,
    location: str,
    episode: tuple[int, int],
) -> None:
    """Adds what is known of an answer. `episode` is task and sample."""
    tree["answer"] = text_tree(event.text, location, "text")
    tree["run_s"] = event.run_ms / 1000
    tree["failure"] = failure_tree(event.failure)
    tree["failed"] = event.failure is not None
    if isinstance(event, GenerationCompleted):
        tree |= {
            "what": event.policy,
            "queue_s": event.queue_ms / 1000,
            "worker": event.worker,
            "versions": versions_in(event.versions),
            "prompt_tokens": event.prompt_tokens,
            "cached_tokens": event.cached_tokens,
            "tokens": len(event.tokens) // 4,
            "finish": event.finish,
        }
        return
    if tree["kind"] == "generate":  # Its request is gone.
        tree["kind"] = "reset" if event.index == 0 else "step"
    if tree["kind"] == "step":
        tree["failed"] = has_failed(event)
    tree |= {
        "index": event.index,
        "worker": event.instance or tree["worker"],
        "reward": event.reward,
        "rewards": dict(event.rewards),
        "terminated": event.terminated,
        "truncated": event.truncated,
        "data": text_tree(event.data, location, "data"),
        "artifacts": [artifact_tree(one, *episode) for one in event.artifacts],
    }


def hop_tree(exchange: Exchange) -> Tree | None:
    """Returns a request and its answer on the timeline; None if the request is gone."""
    request, answer = exchange.request, exchange.answer
    if request is None:
        return None
    event = request.event
    what = event.policy if isinstance(event, GenerationRequested) else event.environment.use
    end = answer.recorded_at if answer is not None else None
    queue_s = run_s = 0.0
    if answer is not None:
        run_s = answer.event.run_ms / 1000
        if isinstance(answer.event, GenerationCompleted):
            queue_s = answer.event.queue_ms / 1000
    return {
        "call": exchange.call,
        "name": f"{event.kind} {encodable(what)}",
        "start": request.recorded_at,
        "end": end,
        "queue_s": queue_s,
        "run_s": run_s,
        "other_s": None if end is None else max(0.0, end - request.recorded_at - queue_s - run_s),
    }
