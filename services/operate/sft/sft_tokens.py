"""Turns rows into token ids, as inference workers turn demonstrations into answers.

So the ids are those that the policy reads and draws when it later learns by reward, and the learner
takes them for demonstrations.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.schemas.events import Sampling
from headrace.schemas.packed import unpack_i32
from headrace.schemas.recipe.policy import Policy
from headrace.services.inference.demonstration import demonstrate
from headrace.services.inference.engine import EnginePrompt
from headrace.services.inference.tokenizer import Tokenizer
from headrace.services.operate.sft.sft_rows import SftExchange, SftRow
from headrace.services.tasks.task_maker import sampling_of
from headrace.trainer.sequences import TokenSequence


def learned_sampling(policy: Policy) -> Sampling:
    """Returns the sampling that demonstrations of a policy are learned with.

    Of a schema they are free, and a temperature of 0 has no cross-entropy.
    """
    sampling = sampling_of(policy)
    temperature = sampling.temperature or 1.0
    return sampling.model_copy(update={"json_schema": "", "temperature": temperature})


class RowTokens:
    """Makes the token sequences of rows."""

    def __init__(self, folder: Path, policy: Policy, context: int) -> None:
        """`folder` has the policy's model. `context` limits a row, in tokens; 0 does not.

        Raises UsageError if the folder has no usable tokenizer.
        """
        self._tokenizer = Tokenizer(folder, policy.chat_template_kwargs)
        self._sampling = learned_sampling(policy)
        self._stops = (
            *unpack_i32(self._sampling.stop_ids),
            *self._tokenizer.stop_ids(self._sampling.stop),
        )
        self._allowed = unpack_i32(self._sampling.allowed)
        self._context = context or sys.maxsize

    def sequence(self, row: SftRow, number: int, name: str) -> TokenSequence:
        """Returns a row as a sequence of demonstrated tokens, up to its last learned answer.

        `number` becomes its sample and its group, and `name` is for people. Raises ValueError if it
        is too long, or if the policy could not draw an answer.
        """
        tokens: list[int] = []
        positions: list[int] = []
        counts: list[int] = []
        last = max(index for index, one in enumerate(row.exchanges) if one.learned)
        for one in row.exchanges[: last + 1]:
            tokens += self._read(one, row.tools if not tokens else (), tokens)
            answer = self._answer(one, tokens)
            if one.learned:
                positions += range(len(tokens), len(tokens) + len(answer))
                counts.append(len(answer))
            tokens += answer
        return demonstrated(tokens, positions, counts, self._sampling, number, name)

    def _read(self, one: SftExchange, tools: Sequence[object], before: Sequence[int]) -> list[int]:
        if not one.messages:
            return self._tokenizer.encode_content(one.text)
        tree = {"messages": list(one.messages)} | ({"tools": list(tools)} if tools else {})
        chat = json.dumps(tree, sort_keys=True, ensure_ascii=False)
        return self._tokenizer.chat(chat, before)

    def _answer(self, one: SftExchange, before: Sequence[int]) -> list[int]:
        ids = self._tokenizer.encode_demonstration(one.answer, self._sampling.stop)
        prompt = EnginePrompt(
            policy="",
            tokens=before,
            max_tokens=self._sampling.max_tokens if one.learned else sys.maxsize,
            stop_ids=self._stops,
            allowed=self._allowed if one.learned else (),
        )
        answer = demonstrate(prompt, ids, self._context)
        if answer.finish == "overflow":
            raise ValueError(f"it has more than {self._context} tokens, the model's context")
        return list(answer.tokens)


def demonstrated(
    tokens: Sequence[int],
    positions: Sequence[int],
    counts: Sequence[int],
    sampling: Sampling,
    number: int,
    name: str,
) -> TokenSequence:
    """Returns token ids as a sequence of which those at `positions` are demonstrated.

    `counts` has the number of these tokens in each answer.
    """
    return TokenSequence(
        tokens=np.array(tokens, dtype=np.int64),
        positions=np.array(positions, dtype=np.int64),
        samplings=tuple((sampling, count) for count in counts),
        sample=number,
        group=number,
        name=name,
        turns=tuple(range(len(counts))),
        **shown_values(len(positions)),
    )


def shown_values(size: int) -> dict[str, Any]:
    """Returns the fields of a sequence that are the same for each demonstrated token.

    Each value is stored once, so they take no memory for each token.
    """
    values: dict[str, np.generic] = {
        "behaviour": np.float32(0),
        "advantages": np.float32(1),
        "versions": np.int64(-1),
        "demonstrated": np.bool_(True),
    }
    return {name: np.broadcast_to(value, size) for name, value in values.items()}
