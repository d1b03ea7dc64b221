"""Chat templates: new messages are appended, and what was said stays the ids that it was."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest

from headrace.errors import UsageError
from headrace.schemas import packed
from headrace.schemas.events import (
    ActionRequested,
    EpisodeStarted,
    GenerationCompleted,
    GenerationRequested,
    ObservationRecorded,
    Sampling,
    TaskSubmitted,
    Use,
)
from headrace.services.agent.episode import Episode
from headrace.services.agent.turns import arrange
from headrace.services.inference.engine import EngineSetup, Weights
from headrace.services.inference.engine_slots import Slots
from headrace.services.inference.engines.scripted import ScriptedEngine
from headrace.services.inference.serving import ServedPolicy
from headrace.services.inference.tokenizer import Tokenizer
from headrace.services.models.weights import model_folder

MODEL = model_folder("tiny-llama")
CHATML = """\
{%- if tools %}{{ '<sys>' + tools | tojson + '</sys>' }}{% endif %}
{%- for message in messages %}
{{- '[' + message.role + ']' + message.content + bos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"""
REWRITING = """\
{%- for message in messages -%}
{%- if loop.index0 < messages | length - 2 -%}
[gone {{ loop.index0 }} of {{ messages | length }}]
{%- elif message.role == 'assistant' -%}
[assistant]{{ message.content.split('</think>')[-1] | trim }}!
{%- else -%}
[{{ message.role }}]{{ message.content }};
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}[assistant]{% endif %}"""
"""Shortens what is older than two messages, and drops reasoning: as many a model's does."""


def a_model(folder: Path, template: str | None, **configuration: Any) -> Path:
    """A model's folder with such a template; its tokenizer has a token for each byte."""
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_bytes((MODEL / "tokenizer.json").read_bytes())
    (folder / "config.json").write_text('{"vocab_size": 258, "max_position_embeddings": 4096}')
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "|"} | configuration))
    return folder


def chat(*messages: tuple[str, str], **more: Any) -> str:
    listed = [{"role": role, "content": content} for role, content in messages]
    return json.dumps({"messages": listed} | more)


def test_a_first_message_is_rendered_whole(tmp_path: Path) -> None:
    tokenizer = Tokenizer(a_model(tmp_path, CHATML))
    ids = tokenizer.chat(chat(("system", "be"), ("user", "hi"), tools=[{"name": "f"}]), [])
    assert tokenizer.decode(ids) == '<sys>[{"name": "f"}]</sys>[system]be|[user]hi|[assistant]'


@pytest.mark.parametrize(("said", "ending"), [("yes", "|"), ("yes|", "")])
def test_a_turn_is_ended_once_by_the_policy_or_by_the_template(
    tmp_path: Path, said: str, ending: str
) -> None:
    tokenizer = Tokenizer(a_model(tmp_path, CHATML))
    added = tokenizer.chat(chat(("tool", "42"), ("user", "so?")), tokenizer.encode(said))
    assert tokenizer.decode(added) == f"{ending}[tool]42|[user]so?|[assistant]"


def test_a_template_gets_the_recipes_values_by_name(tmp_path: Path) -> None:
    """For the first messages of a context, and for later ones."""
    source = CHATML + "{{ '(thinks)' if enable_thinking else '' }}"
    folder = a_model(tmp_path, source)
    for given, ending in (({}, ""), ({"enable_thinking": True}, "(thinks)")):
        tokenizer = Tokenizer(folder, given)
        for context in ([], tokenizer.encode("yes|")):
            ids = tokenizer.chat(chat(("user", "hi")), context)
            assert tokenizer.decode(ids) == f"[user]hi|[assistant]{ending}"


def test_templates_of_the_configuration_are_read_too(tmp_path: Path) -> None:
    named = [{"name": "other", "template": "x"}, {"name": "default", "template": CHATML}]
    for number, template in enumerate([CHATML, named]):
        folder = a_model(
            tmp_path / str(number), None, chat_template=template, bos_token={"content": "#"}
        )
        assert (
            Tokenizer(folder).decode(Tokenizer(folder).chat(chat(("user", "hi")), []))
            == "[user]hi#[assistant]"
        )


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ("{", "Expecting"),
        ("[]", "needs `messages`"),
        ('{"messages": []}', "not empty"),
        ('{"messages": [1]}', "with a role"),
        ('{"messages": [{"role": "user"}], "more": 1}', "and nothing else"),
        ('{"messages": [{"role": "user"}]}', "can't render"),
    ],
)
def test_what_is_no_chat_is_refused(tmp_path: Path, request_: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Tokenizer(a_model(tmp_path, CHATML)).chat(request_, [])


def test_a_model_without_a_template_and_a_template_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no chat template"):
        Tokenizer(a_model(tmp_path / "none", None)).chat(chat(("user", "hi")), [])
    with pytest.raises(UsageError, match="the chat template of"):
        Tokenizer(a_model(tmp_path / "broken", "{% if %}"))
    mute = Tokenizer(a_model(tmp_path / "mute", "{{ messages[0].content }}"))
    with pytest.raises(ValueError, match="0 times"):
        mute.chat(chat(("user", "hi")), [1])
    with pytest.raises(ValueError, match="no tools here"):
        Tokenizer(a_model(tmp_path / "strict", "{{ raise_exception('no tools here') }}")).chat(
            chat(("user", "hi")), []
        )


def test_a_template_can_touch_nothing(tmp_path: Path) -> None:
    escape = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(ValueError, match="can't render"):
        Tokenizer(a_model(tmp_path, escape)).chat(chat(("user", "hi")), [])


@dataclass
class World:
    """Answers an episode's requests as an inference worker does, by a scripted policy."""

    folder: Path
    prompts: list[list[int]] = field(default_factory=list)
    """What the engine was given, each time."""
    attempt: int = 0

    def __post_init__(self) -> None:
        sampling = Sampling(max_tokens=24, stop=("!", "|"))
        submitted = TaskSubmitted(
            source="s", task_id="t", item_id="i", agent="a", samples=1, max_turns=100,
            max_tokens=10_000, deadline_s=60, roles={"policy": Use(policy="p", sampling=sampling)},
        )  # fmt: skip
        self.started = EpisodeStarted(task=0, sample=0, submitted=submitted, seed=0, deadline=2**50)
        self.tokenizer = Tokenizer(self.folder)
        self.weights = self.folder / "model.safetensors"
        self.weights.write_bytes((2).to_bytes(8, "little") + b"{}")
        self.random = Random(1)

    async def ask_policy(self, request: GenerationRequested) -> GenerationCompleted:
        said = f"<think>{self.random.randrange(10**6)}</think> {self.random.randrange(100)}"
        said += self.random.choice(["!", "|", " and so on without an end"])
        engine = ScriptedEngine(EngineSetup(self.folder, 1, options={"text": said}))
        await engine.load(Weights("p", 0, self.weights))
        seen, generate = self.prompts, engine.generate

        async def noted(prompt: Any) -> Any:
            seen.append(list(prompt.tokens))
            return await generate(prompt)

        engine.generate = noted  # type: ignore[method-assign]
        slots = Slots(engine)
        served = ServedPolicy("p", engine, slots, self.tokenizer, "w", version=0)
        answer = await served.complete(request, await slots.take(), 0.0)
        assert answer is not None
        assert answer.failure is None, answer.failure
        return answer

    async def ask_environment(self, request: ActionRequested) -> ObservationRecorded:
        raise AssertionError("there is no environment")


@pytest.mark.parametrize("template", [REWRITING, CHATML])
def test_twenty_turns_of_a_template_that_rewrites_history_are_never_retokenized(
    tmp_path: Path, template: str
) -> None:
    """Each prompt is the one before, what was drawn, and what is new: id by id."""
    world = World(a_model(tmp_path, template))

    async def play() -> Episode:
        episode = Episode(world, {})
        for turn in range(20):
            role = "tool" if turn % 3 else "user"
            messages: Sequence[Mapping[str, Any]] = [{"role": role, "content": f"turn {turn}"}]
            generation = await episode.chat(messages)
            assert generation.text.startswith("<think>")
        return episode

    episode = asyncio.run(play())
    turns, _ = arrange(episode.turns)
    assert len(turns) == len(world.prompts) == 20
    context: list[int] = []
    for number, (turn, prompt) in enumerate(zip(turns, world.prompts, strict=True)):
        context += packed.unpack_i32(turn.context)
        assert prompt == context, f"turn {number}"
        assert f"turn {number}" in world.tokenizer.decode(packed.unpack_i32(turn.context))
        assert turn.parent == number - 1
        context += packed.unpack_i32(turn.tokens)
    whole = world.tokenizer.decode(context)
    assert whole.count("<think>") == 20, "what was thought is there, where the template drops it"
    assert whole.count("[assistant]") == 20
    assert "gone" not in whole


def test_text_and_messages_at_once_are_an_operators_failure(tmp_path: Path) -> None:
    world = World(a_model(tmp_path, CHATML))
    request = GenerationRequested(
        task=0, sample=0, call="1", policy="p", text="a", chat=chat(("user", "b")),
        sampling=Sampling(max_tokens=1), expires_at=2**50, digest=bytes(16),
    )  # fmt: skip
    with pytest.raises(AssertionError, match="not both"):
        asyncio.run(world.ask_policy(request))
