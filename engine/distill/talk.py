"""More prompts of the kind people type into a chat: sums, puzzles, roles, letters, opinions.

Built from slots, so that no two need be alike; none comes from a data set.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from parlay.engine.distill.prompts import Prompt
from parlay.engine.distill.words import CITIES, GOODS, NAMES, TOPICS

ROLES = (
    "a pirate captain",
    "a strict librarian",
    "a cheerful robot",
    "a medieval blacksmith",
    "a nutritionist",
    "a detective in the 1930s",
    "a football coach",
    "an old lighthouse keeper",
    "a science fiction author",
    "a kindergarten teacher",
    "a sceptical physicist",
    "a tour guide",
    "a career adviser",
    "a film critic",
    "a gardener",
    "a lawyer",
    "a chef",
    "a ghost",
    "a talking cat",
    "a mountain climber",
    "a database administrator",
    "a poet",
    "a diplomat",
)
PLACES = (
    "Norway",
    "Kyoto",
    "Morocco",
    "the Alps",
    "Mexico City",
    "Iceland",
    "Rome",
    "Cape Town",
    "New Zealand",
    "Istanbul",
    "Patagonia",
    "Vienna",
    "Bali",
    "Scotland",
    "Jaipur",
    "Havana",
)
EVENTS = (
    "a delayed order",
    "a job offer",
    "a birthday party",
    "a broken washing machine",
    "a promotion",
    "a neighbour's loud music",
    "a lost suitcase",
    "a team meeting",
    "a scholarship",
    "a refund",
    "a wedding invitation",
    "moving to another town",
    "a data breach",
    "an overdue invoice",
    "a school trip",
    "a surprise visit",
    "a missed deadline",
    "a charity run",
    "a new colleague",
)
FEELINGS = (
    "nervous about an exam",
    "bored at work",
    "lonely in a new city",
    "tired all the time",
    "stuck on a project",
    "afraid of flying",
    "proud of a friend",
    "unsure which car to buy",
    "overwhelmed by email",
    "angry at a flatmate",
    "worried about money",
    "short of ideas",
)
THINGS = (
    "a bicycle",
    "a smartphone",
    "an umbrella",
    "a wooden table",
    "a refrigerator",
    "a piano",
    "a tent",
    "a camera",
    "a bookshelf",
    "a coffee machine",
    "a pair of running shoes",
    "a clock",
)
CLAIMS = (
    "Schools should start later in the morning",
    "Everyone should learn to program",
    "Cities should ban cars from their centres",
    "Working from home makes people happier",
    "Zoos should be closed",
    "Social media does more harm than good",
    "Homework is useless",
    "Space exploration is worth its cost",
    "A four-day week is better for everyone",
    "Books are better than films",
    "Tourism ruins beautiful places",
    "Exams should be abolished",
)
SUBJECTS = (
    "inertia",
    "supply and demand",
    "a recursive function",
    "osmosis",
    "the Doppler effect",
    "opportunity cost",
    "a prime number",
    "natural selection",
    "an API",
    "the placebo effect",
    "entropy",
    "a constitution",
    "compound interest",
    "a catalyst",
    "a metaphor",
    "radioactivity",
    "plate tectonics",
    "a hash table",
    "inflation targeting",
    "the greenhouse effect",
    "a vector",
    "the scientific method",
    "a black swan event",
    "a neuron",
    "an eclipse",
    "probability",
    "a covalent bond",
    "a compiler",
    "the Cold War",
    "a monopoly",
    "a derivative",
    "erosion",
)
PLAIN = (
    "You are {role}. Introduce yourself and tell me about {topic}.",
    "Pretend to be {role} and give me advice: I am {feeling}.",
    "Answer as {role} would: what do you think of {topic}?",
    "I am {feeling}. What should I do?",
    "Plan a three-day trip to {place} for two people who like {topic}.",
    "Write a diary entry of someone who has just arrived in {place}.",
    "What should I pack for a week in {place}?",
    "Write a polite email about {event}.", "Write a short text message about {event}.",
    "Draft a formal letter from {name} about {event}. Keep it under 120 words.",
    "Do you agree? {claim}. Argue both sides, then give a conclusion.",
    "Write an essay with the title \"{claim}\".", "Give three arguments against this: {claim}.",
    "Explain {subject} with an everyday example.", "What is {subject}, and why does it matter?",
    "What is the difference between {subject} and {subject2}?",
    "Explain {subject} to a student who has never heard of it, in four sentences.",
    "Give me a list of ten ideas for {event}.", "Describe {thing} without naming it.",
    "Write an advertisement for {thing}.", "How do I choose {thing}?",
    "How is {thing} made? Answer step by step.", "What are good alternatives to {thing}?",
    "Write a story that begins with: \"{name} had never been to {place} before.\"",
    "Write a scene in which {name} and {name2} argue about {event}.",
    "Write four lines that rhyme about {name}, who lives in {city}.",
    "Write a haiku about {place}, then explain it.", "Invent a proverb about {topic}.",
    "Make a table that compares {place} and {place2} for a holiday.",
    "Give me the main facts about {topic} as bullet points, then a one-line summary.",
    "Which three books about {topic} would you recommend, and why?",
    "What would happen if everyone in {place} suddenly owned {thing}?",
    "Rewrite this more politely: \"I want my money back for {thing}, now.\"",
    "Translate into French and explain the grammar: \"{name} lives in {city}.\"",
    "Answer with true or false and give a reason: {claim}.",
    "Which word does not belong: {good}, {good2}, {city}, {good3}? Explain.",
    "Write a recipe that {role} would like.", "Give me a riddle about {thing} and its answer.",
    "Summarise what is known about {topic} in exactly three sentences.",
    "Create an outline for a presentation on {topic} with five slides.",
    "Write interview questions for {role}, and possible answers.",
    "Who is {name}? {name} lives in {city}, owns {thing} and is {feeling}. Describe the person.",
)  # fmt: skip
SUMS = (
    "{name} buys {a} {good}s at {b} dollars each and pays with {c} dollars. How much is left?",
    "A train travels {a} km in {b} hours. How far does it go in {c} hours at the same speed?",
    "What is {a} times {b}, plus {c}? Show the steps.", "Solve for x: {b}x + {a} = {c}.",
    "A rectangle is {a} m long and {b} m wide. What are its area and its perimeter?",
    "{name} is {a} years old and {name2} is {b} years older. How old will both be in {d} years?",
    "What is {d} percent of {c}?", "A shop sold {a} {good}s on Monday and {b} on Tuesday. "
    "Each costs {d} dollars. What was earned?", "Write the next three numbers: {b}, {b2}, {b3}.",
    "There are {a} people at a party and {d} leave each hour. How many remain after {b} hours?",
    "A bag has {a} red and {b} blue balls. What is the probability of drawing a red one?",
    "{name} is taller than {name2}. {name2} is taller than {name3}. Who is the shortest?",
    "If all {good}s are {good2}s and some {good2}s are blue, are some {good}s blue? Explain.",
    "Convert {c} minutes to hours and minutes.", "What is the average of {a}, {b} and {c}?",
)  # fmt: skip


def talk_prompts(count: int, seed: int) -> Iterator[Prompt]:
    """Yield `count` different chat prompts, the same for the same seed."""
    rng = random.Random(f"talk {seed}")
    seen: set[str] = set()
    while len(seen) < count:
        text = _fill(rng.choice(PLAIN if rng.random() < 0.75 else SUMS), rng)
        if text not in seen:
            seen.add(text)
            yield Prompt("chat", text)


def _fill(shape: str, rng: random.Random) -> str:
    names, goods, b = rng.sample(NAMES, 3), rng.sample(GOODS, 3), rng.randrange(2, 12)
    pick: Callable[[tuple[str, ...]], list[str]] = lambda words: rng.sample(words, 2)  # noqa: E731
    places, subjects = pick(PLACES), pick(SUBJECTS)
    return shape.format(
        role=rng.choice(ROLES), feeling=rng.choice(FEELINGS), event=rng.choice(EVENTS),
        thing=rng.choice(THINGS), claim=rng.choice(CLAIMS), topic=rng.choice(TOPICS),
        city=rng.choice(CITIES), place=places[0], place2=places[1], subject=subjects[0],
        subject2=subjects[1], name=names[0], name2=names[1], name3=names[2], good=goods[0],
        good2=goods[1], good3=goods[2], a=rng.randrange(12, 60), b=b, b2=2 * b, b3=4 * b,
        c=rng.randrange(100, 400), d=rng.randrange(2, 12),
    )  # fmt: skip
