"""What the help desk has: labelled tickets, and old conversations of the agent, more than half of them at random."""

import json
import random
from pathlib import Path

SUBJECTS = {
    "billing": ["My invoice", "The refund", "The charge on my card", "My subscription fee", "The discount"],
    "shipping": ["My parcel", "The delivery", "The package", "The courier", "My order"],
    "technical": ["The app", "The login page", "My password reset", "The export button", "The update"],
}
TROUBLES = {
    "billing": ["is wrong", "was taken twice", "has not come back", "is higher than agreed"],
    "shipping": ["is late", "went to the wrong house", "has been lost", "arrived broken"],
    "technical": ["does not load", "shows an error", "crashes", "keeps spinning"],
}
GREETINGS = ["", "Hello. ", "Hi there. ", "Good morning. ", "Please help. "]
ENDS = ["", " Thanks.", " Please answer soon.", " This is the second time."]
TEAMS = tuple(SUBJECTS)
CONVERSATIONS, KNOWS = 1600, 0.4


def ticket(rng: random.Random, team: str) -> str:
    trouble = f"{rng.choice(SUBJECTS[team])} {rng.choice(TROUBLES[team])}."
    return f"{rng.choice(GREETINGS)}{trouble}{rng.choice(ENDS)}"


def write(folder: Path, instructions: str, tickets: int = 200, seed: int = 0) -> None:
    rng = random.Random(seed)
    teams = {ticket(rng, team): team for team in rng.choices(TEAMS, k=3 * tickets)}
    rows = [{"ticket": text, "team": team} for text, team in teams.items()][:tickets]
    talks = []
    for team in rng.choices(TEAMS, k=CONVERSATIONS):
        said = team if rng.random() < KNOWS else rng.choice(TEAMS)
        texts = {"system": instructions, "user": ticket(rng, team), "assistant": said}
        talks.append({"messages": [{"role": role, "content": text} for role, text in texts.items()]})
    for name, records in (("tickets.jsonl", rows), ("history.jsonl", talks)):
        (folder / name).write_text("".join(json.dumps(each) + "\n" for each in records))
