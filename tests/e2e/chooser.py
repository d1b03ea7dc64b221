"""An agent that can't answer otherwise than by a JSON schema."""

from __future__ import annotations

import json

from headrace.services.agent.episode import Episode

SCHEMA = {
    "type": "object",
    "properties": {"go": {"enum": ["left", "down", "right", "up"]}},
    "required": ["go"],
    "additionalProperties": False,
}


async def agent(episode: Episode) -> None:
    """Right is right."""
    answer = await episode.generate("where to?", json_schema=SCHEMA)
    episode.reward = float(json.loads(answer.text)["go"] == "right")
