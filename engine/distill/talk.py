"""More prompts of the kind people type into a chat: sums, puzzles, roles, letters, opinions.

Built from slots, so that no two need be alike; none comes from a data set.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from parlay.engine.distill.prompts import Prompt
from parlay.engine.distill.words import (
    CITIES,
    CLAIMS,
    EVENTS,
    FEELINGS,
    GOODS,
    NAMES,
    PLACES,
    ROLES,
    SUBJECTS,
    THINGS,
    TOPICS,
)

PLAIN = (
    "You are {role}. Introduce yourself and tell me about {topic}.",
    "Pretend to be {role} and give me advice: I am {feeling}.",
    "Answer as {role} would: what do you think of {topic}?", "I am {feeling}. What should I do?",
    "Plan a three-day trip to {place} for two people who like {topic}.",
    "Write a diary entry of someone who has just arrived in {place}.",
    "What should I pack for a week in {place}?", "Write a polite email about {event}.",
    "Write a short text message about {event}.",
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
    "Write a recipe that {role} would like.", "Give me a riddle about {thing} and its answer.",
    "Summarise what is known about {topic} in exactly three sentences.",
    "Create an outline for a presentation on {topic} with five slides.",
    "Write interview questions for {role}, and possible answers.",
    "Who is {name}? {name} lives in {city}, owns {thing} and is {feeling}. Describe the person.",
)  # fmt: skip
MORE = (
    "Why did {topic} become important in the twentieth century?",
    "Discuss the economic and social effects of {topic}.",
    "What role did {place} play in the history of trade?",
    "Compare the political systems of {place} and {place2}.",
    "What ethical questions does {topic} raise?", "Who influenced {topic} the most, and how?",
    "How do scientists study {subject}?", "What evidence is there for {subject}?",
    "Describe an experiment that shows {subject}.",
    "Explain how {subject} and {topic} are connected, if they are.",
    "What are the stages of {topic}? Explain each of them in a sentence or two.",
    "I have an interview about {subject} tomorrow. Ask me five questions and answer them.",
    "What is the most common mistake when people explain {subject}?",
    "Give the pros and cons of living in {place}, then recommend a city.",
    "Write the opening paragraph of a novel set in {place}.",
    "Write a speech for {event} that is funny but kind.",
    "Write a social media post about {event} with three hashtags.",
    "Write the minutes of a meeting about {event}.",
    "Write a complaint about {thing} to a shop in {city}.",
    "Describe a market in {place} so that the reader smells and hears it.",
    "How would {role} and {role2} disagree about {topic}? Write their conversation.",
    "Design a simple database for a shop that sells {good}s. List the tables and their columns.",
    "Which algorithm would you use to find the cheapest {good} among a million offers? Why?",
    "Explain the difference between a process and a thread to {role}.",
    "How do I debug a program that is slow when it reads {c} files?",
    "Write an SQL query that lists the {a} best customers of {city} by money spent.",
    "What does a web server do when {name} opens a page? Explain step by step.",
    "Write a shell command that finds all files changed in the last {b} days, and explain it.",
    "Read this: {name}, {a}, lives in {city} and sells {good}s. {name2}, {b}{d}, lives in "
    "{place} and buys {good2}s. List the people, ages, and places as JSON.",
    "Put these in order of size and explain: {thing}, {thing2}, a {good}.",
    "A {good} costs {c} dollars after a discount of {d} percent. What was its price before?",
    "How many whole numbers between {a} and {c} are divisible by {b}?",
    "{name} starts work at {d} and works {b} hours with a break of {a} minutes. When is it over?",
    "Give me a plan to learn about {subject} in {b} weeks.",
    "Turn {claim} into a neutral headline.",
    "What would you say to someone who is {feeling}?", "How can {role} help with {event}?",
    "Tell me a joke about {thing}, then explain why it is funny.",
    "Write a dialogue in which {name} teaches {name2} about {subject}.",
)  # fmt: skip
SUMS = (
    "{name} buys {a} {good}s at {b} dollars each and pays with {c} dollars. How much is left?",
    "A train travels {a} km in {b} hours. How far does it go in {c} hours at the same speed?",
    "What is {a} times {b}, plus {c}? Show the steps.", "Solve for x: {b}x + {a} = {c}.",
    "A rectangle is {a} m long and {b} m wide. What are its area and its perimeter?",
    "{name} is {a} years old and {name2} is {b} years older. How old will both be in {d} years?",
    "What is {d} percent of {c}?",
    "A shop sold {a} {good}s on Monday and {b} on Tuesday. Each costs {d} dollars. What was "
    "earned?",
    "Write the next three numbers: {b}, {b2}, {b3}.",
    "There are {a} people at a party and {d} leave each hour. How many remain after {b} hours?",
    "A bag has {a} red and {b} blue balls. What is the probability of drawing a red one?",
    "{name} is taller than {name2}. {name2} is taller than {name3}. Who is the shortest?",
    "If all {good}s are {good2}s and some {good2}s are blue, are some {good}s blue? Explain.",
    "Convert {c} minutes to hours and minutes.", "What is the average of {a}, {b} and {c}?",
)  # fmt: skip
SHAPES = (*PLAIN, *MORE, *SUMS)


def talk_prompts(count: int, seed: int) -> Iterator[Prompt]:
    """Yield `count` different chat prompts, the same for the same seed."""
    rng = random.Random(f"talk {seed}")
    seen: set[str] = set()
    while len(seen) < count:
        text = _fill(rng.choice(SHAPES), rng)
        if text not in seen:
            seen.add(text)
            yield Prompt("chat", text)


def _fill(shape: str, rng: random.Random) -> str:
    names, goods, b = rng.sample(NAMES, 3), rng.sample(GOODS, 3), rng.randrange(2, 12)
    pick: Callable[[tuple[str, ...]], list[str]] = lambda words: rng.sample(words, 2)  # noqa: E731
    places, subjects, roles, things = map(pick, (PLACES, SUBJECTS, ROLES, THINGS))
    return shape.format(
        role=roles[0], role2=roles[1], feeling=rng.choice(FEELINGS), event=rng.choice(EVENTS),
        thing=things[0], thing2=things[1], claim=rng.choice(CLAIMS), topic=rng.choice(TOPICS),
        city=rng.choice(CITIES), place=places[0], place2=places[1], subject=subjects[0],
        subject2=subjects[1], name=names[0], name2=names[1], name3=names[2], good=goods[0],
        good2=goods[1], good3=goods[2], a=rng.randrange(12, 60), b=b, b2=2 * b, b3=4 * b,
        c=rng.randrange(100, 400), d=rng.randrange(2, 12),
    )  # fmt: skip
