"""Routes support tickets: `python agent.py "I was charged twice"` prints the name of a team."""

import sys

from openai import OpenAI

TEAMS = ("billing", "shipping", "technical")
CLIENT = OpenAI()
INSTRUCTIONS = "Route the support ticket. Answer with the name of one team: billing, shipping, technical."


def answer(ticket: str) -> str:
    reply = CLIENT.chat.completions.create(
        model="gpt-5-mini",
        messages=[{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": ticket}],
        max_completion_tokens=8,
    )
    text = (reply.choices[0].message.content or "").strip().lower()
    return text if text in TEAMS else "unrouted"


if __name__ == "__main__":
    sys.stdout.write(answer(sys.argv[1]) + "\n")
