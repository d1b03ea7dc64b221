"""A program of the agent `command`: asks its model once, if there is one."""

import json
import os
import sys

from openai import OpenAI

task = json.load(sys.stdin)
if "OPENAI_BASE_URL" in os.environ:
    OpenAI().chat.completions.create(
        model=os.environ["OPENAI_MODEL"], messages=[{"role": "user", "content": "How are you?"}]
    )
print(json.dumps({"reward": 1.0}))
