"""Sends episodes as traces over OTLP, by the semantic conventions for generative AI.

An episode is a trace: a span `invoke_agent`, and below it a span `chat` for each generation and a
span `execute_tool` for each answer of an environment. Ids are digests of what they name, so a
second export sends the same spans and a store that keeps spans by id holds each once. The
conventions are those of OpenTelemetry's semantic-conventions 1.41, where they are in development.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import version

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.util.types import AttributeValue

from headrace.errors import DependencyError
from headrace.schemas.events import Failure, GenerationCompleted
from headrace.services.operate.trajectories.recorded_episodes import (
    RecordedEpisode,
    TimedAnswer,
    UnpackedTurn,
)

PROVIDER = "headrace"
AT_ONCE = 512
"""Most spans in one request."""
REQUEST_BYTES = 4 << 20
"""Most bytes of texts in one request, if it has several spans. Collectors refuse larger requests:
by default from 20 MiB over HTTP, and those that pass them on over gRPC from 4 MiB."""
SPAN_BYTES = 1 << 10
"""Bytes of a span without its texts, about."""
TIMEOUT_S = 30.0
NS_PER_S = 1_000_000_000
Attributes = dict[str, AttributeValue]


def span_id(name: str) -> int:
    """Returns 64 bits that follow from what a span is about. Never 0, which OTLP forbids."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) or 1


def trace_id(name: str) -> int:
    """Returns 128 bits that follow from an episode's name. Never 0, which OTLP forbids."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:16]) or 1


class EpisodeSpans:
    """Makes the spans of one episode."""

    def __init__(self, episode: RecordedEpisode, resource: Resource, *, content: bool) -> None:
        """With `content`, the spans of generations have the texts of prompt and answer."""
        self._episode = episode
        self._resource = resource
        self._content = content
        self._scope = InstrumentationScope("headrace", version("headrace"))
        self._root = self._context(f"{episode.name}/episode")
        self._turns = {one.turn.call: one for one in episode.turns}

    def spans(self) -> list[ReadableSpan]:
        """Returns the episode's span, and then those of its answers."""
        recorded = self._episode.recorded
        attributes: Attributes = {
            **self._common("invoke_agent"),
            "gen_ai.agent.name": recorded.agent,
            "gen_ai.usage.input_tokens": sum(one.prompt_tokens for one in self._episode.turns),
            "gen_ai.usage.output_tokens": sum(len(one.tokens) for one in self._episode.turns),
            "headrace.task": recorded.task,
            "headrace.sample": recorded.sample,
            "headrace.attempt": recorded.attempt,
            "headrace.purpose": recorded.purpose,
            "headrace.ending": recorded.ending,
        }
        if recorded.reward is not None:
            attributes["headrace.reward"] = recorded.reward
        failed = (
            recorded.failures[-1] if recorded.ending == "failed" and recorded.failures else None
        )
        root = self._span(
            f"invoke_agent {recorded.agent}",
            self._root,
            SpanKind.INTERNAL,
            (recorded.started / 1000, recorded.ended / 1000),
            attributes,
            failed,
        )
        return [root, *map(self._of_answer, self._episode.answers)]

    def _of_answer(self, answer: TimedAnswer) -> ReadableSpan:
        event = answer.event
        if isinstance(event, GenerationCompleted):
            turn = self._turns.get(event.call)
            model = event.policy if turn is None else turn.model
            attributes = {**self._common("chat"), **self._of_generation(event, turn)}
            name, kind = f"chat {model}", SpanKind.CLIENT
            attributes |= {"gen_ai.request.model": event.policy, "gen_ai.response.model": model}
        else:
            tool = self._episode.recorded.environment or "environment"
            attributes = {**self._common("execute_tool"), "gen_ai.tool.name": tool}
            attributes |= {"gen_ai.tool.call.id": event.call, "headrace.action": event.index}
            if event.reward is not None:
                attributes["headrace.reward"] = event.reward
            name, kind = f"execute_tool {tool}", SpanKind.INTERNAL
        number = f"{self._episode.recorded.attempt}/{type(event).__name__}/{event.call}"
        context = self._context(f"{self._episode.name}/{number}")
        times = (answer.began_at, answer.ended_at)
        return self._span(name, context, kind, times, attributes, event.failure, self._root)

    def _of_generation(self, event: GenerationCompleted, turn: UnpackedTurn | None) -> Attributes:
        attributes: Attributes = {
            "gen_ai.response.id": f"{self._episode.name}/{event.attempt}/{event.call}",
            "gen_ai.response.finish_reasons": (event.finish,),
            "gen_ai.usage.input_tokens": event.prompt_tokens,
            "gen_ai.usage.output_tokens": len(event.tokens) // 4,
            "headrace.queue_s": event.queue_ms / 1000,
            "headrace.worker": event.worker,
        }
        if turn is not None and self._content:
            for name, role, text, finish in (
                ("gen_ai.input.messages", "user", turn.context_text, None),
                ("gen_ai.output.messages", "assistant", turn.text, event.finish),
            ):
                message = {"role": role, "parts": [{"type": "text", "content": text}]}
                message |= {} if finish is None else {"finish_reason": finish}
                attributes[name] = json.dumps([message], ensure_ascii=False)
        return attributes

    def _common(self, operation: str) -> Attributes:
        return {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.conversation.id": self._episode.name,
        }

    def _context(self, name: str) -> SpanContext:
        flags = TraceFlags(TraceFlags.SAMPLED)
        return SpanContext(trace_id(self._episode.name), span_id(name), False, flags)

    def _span(
        self,
        name: str,
        context: SpanContext,
        kind: SpanKind,
        times: tuple[float, float],
        attributes: Mapping[str, AttributeValue],
        failure: Failure | None,
        parent: SpanContext | None = None,
    ) -> ReadableSpan:
        status = Status(StatusCode.UNSET)
        if failure is not None:
            attributes = {**attributes, "error.type": failure.code}
            status = Status(StatusCode.ERROR, failure.code)
        began_ns, ended_ns = (round(at * NS_PER_S) for at in times)
        return ReadableSpan(
            name=name,
            context=context,
            parent=parent,
            resource=self._resource,
            attributes=attributes,
            kind=kind,
            instrumentation_scope=self._scope,
            status=status,
            start_time=min(began_ns, ended_ns),
            end_time=ended_ns,
        )


class OtlpWriter:
    """Sends the spans of episodes to a collector."""

    def __init__(self, endpoint: str, namespace: str, *, content: bool) -> None:
        """`endpoint` is the URL for traces, for example http://127.0.0.1:4318/v1/traces."""
        self._endpoint = endpoint
        self._content = content
        named = {"service.name": "headrace", "service.namespace": namespace}
        self._resource = Resource(named)
        self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=TIMEOUT_S)
        self._waiting: list[ReadableSpan] = []
        self._bytes = 0

    def write(self, episode: RecordedEpisode) -> None:
        """Adds an episode, and sends what has come together. Blocks.

        Raises DependencyError if the collector does not take it.
        """
        spans = EpisodeSpans(episode, self._resource, content=self._content)
        for span in spans.spans():
            size = _size(span)
            if self._bytes + size > REQUEST_BYTES or len(self._waiting) >= AT_ONCE:
                self._send()
            self._waiting.append(span)
            self._bytes += size

    def close(self) -> None:
        """Sends the rest. Raises DependencyError as `write` does."""
        self._send()
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _send(self) -> None:
        sent, self._waiting, self._bytes = self._waiting, [], 0
        if sent and self._exporter.export(sent) is not SpanExportResult.SUCCESS:
            raise DependencyError(
                f"the collector at {self._endpoint} did not take {len(sent)} spans. Check the URL, "
                "which usually ends in /v1/traces, and the collector's log. Then run the command "
                "again: spans that arrived keep their ids"
            )


def _size(span: ReadableSpan) -> int:
    """Returns about how many bytes a span takes in a request."""
    texts = (one for one in (span.attributes or {}).values() if isinstance(one, str))
    return SPAN_BYTES + sum(len(one.encode("utf-8", "replace")) for one in texts)
