"""Prompts that the draft model is distilled on: written here or built from the standard library.

None comes from MT-Bench, HumanEval, Spec-Bench or the demo, on which drafts are measured.
"""

from __future__ import annotations

import ast
import json
import random
import sysconfig
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

TOPICS = (
    "photosynthesis", "the water cycle", "black holes", "the French Revolution", "machine learning",
    "the stock market", "healthy eating", "yoga", "the Roman Empire", "electric cars", "coffee",
    "the immune system", "volcanoes", "jazz music", "recycling", "time management", "chess",
    "public speaking", "the human heart", "blockchain", "gardening", "climate change", "whales",
    "the moon landing", "sleep", "remote work", "the printing press", "vaccines", "rainforests",
    "meditation", "the theory of evolution", "budgeting", "solar power", "the Great Wall of China",
    "learning a new language", "bees", "databases", "cooking rice", "the Renaissance", "earthquakes",
    "friendship", "operating systems", "running a marathon", "impressionist painting", "gravity",
    "job interviews", "the digestive system", "honey", "renewable energy", "computer viruses",
    "the Silk Road", "antibiotics", "dinosaurs", "poetry", "tea", "inflation", "the ozone layer",
    "cats", "digital photography", "democracy", "the periodic table", "online shopping", "bread",
    "note taking", "DNA", "the Industrial Revolution", "swimming", "tides", "urban planning",
    "sleeping better", "negotiation", "origami", "coral reefs", "the speed of light", "chocolate",
    "airplanes", "leadership", "cloud computing", "the nervous system", "hiking", "glaciers",
    "starting a small business", "data privacy", "ancient Egypt", "bicycles", "wind turbines",
    "stress", "the violin", "satellites", "the solar system", "writing a novel", "penguins",
    "fermentation", "robotics", "insurance", "the Olympic Games", "mental health", "bridges",
    "credit scores", "lighthouses", "public libraries", "astronomy", "soil", "open source software",
    "volunteering", "mushrooms", "quantum computing", "railways", "the Great Depression", "owls",
    "interior design", "hydration", "clocks", "the brain", "pottery", "search engines", "deserts",
)
ASKS = (
    "Explain {t} to a ten-year-old.", "What are the main benefits of {t}?", "Write a short story about {t}.",
    "Give me five interesting facts about {t}.", "What should a beginner know about {t}?",
    "Write a short poem about {t}.", "What are common misconceptions about {t}?",
    "Summarize the history of {t} in one paragraph.", "How does {t} affect everyday life?",
    "Write a friendly email to a colleague about {t}.", "List the pros and cons of {t}.",
    "I want to learn about {t}. Where should I start?", "Why is {t} important?",
    "Compare {t} with {u}.", "Write an introduction for a blog post about {t}.",
    "What are three questions an expert on {t} would ask?", "Describe {t} in simple terms.",
    "Write a dialogue between a teacher and a student about {t}.", "Can you outline an essay about {t}?",
    "Imagine a world without {t}. What would change?", "Give step-by-step advice on {t}.",
    "What is the relationship between {t} and {u}?", "Write a product description related to {t}.",
    "What are the latest challenges in {t}?", "Create a quiz with three questions about {t}.",
    "Write a persuasive paragraph on why people should care about {t}.", "Define {t} and give an example.",
    "Make a weekly plan for someone interested in {t}.", "What mistakes do people make with {t}?",
    "Write a speech of about 100 words on {t}.", "Tell me something surprising about {t}.",
    "How would you explain {t} to a visitor from the past?", "Write a letter to the editor about {t}.",
    "Act as a travel guide and talk about {t}.", "Suggest a title and a plot for a film about {t}.",
    "What skills are useful for {t}?", "Write a review of a book about {t}.",
)
CODE_TASKS = (
    "reverses a linked list", "checks whether a string is a palindrome", "computes the n-th Fibonacci number",
    "merges two sorted lists", "finds all prime numbers up to n", "counts word frequencies in a text",
    "sorts a list with quicksort", "performs a binary search", "validates an email address",
    "converts Celsius to Fahrenheit", "flattens a nested list", "computes the greatest common divisor",
    "removes duplicates while keeping the order", "rotates a matrix by 90 degrees", "parses a CSV file",
    "finds the longest common prefix", "transposes a matrix", "generates all permutations of a list",
    "checks for balanced parentheses", "computes the factorial of a number", "implements a stack",
    "implements a queue with two stacks", "finds the maximum subarray sum", "inverts a binary tree",
    "computes the depth of a binary tree", "encodes a string with run-length encoding",
    "decodes a Caesar cipher", "finds the two numbers that add up to a target", "counts vowels in a string",
    "computes the moving average of a list", "groups words by their first letter", "reads a JSON file",
    "downloads a file from a URL", "computes the edit distance of two strings", "finds the median of a list",
    "checks if two strings are anagrams", "converts an integer to a Roman numeral",
    "converts a binary string to an integer", "splits a list into chunks", "implements a least recently used cache",
    "finds the intersection of two lists", "computes the dot product of two vectors", "sorts a dictionary by value",
    "capitalizes every word of a sentence", "generates a random password", "finds the second largest number",
    "computes compound interest", "checks whether a year is a leap year", "walks a directory tree",
    "counts the lines of a file", "implements depth-first search", "implements breadth-first search",
    "computes the power set of a set", "finds the mode of a list", "removes punctuation from a string",
    "implements bubble sort", "implements merge sort", "computes the area of a polygon", "rounds to the nearest ten",
    "finds missing numbers in a sequence", "converts seconds to hours, minutes and seconds",
    "finds the shortest path in a graph", "implements a bank account class", "computes a checksum",
    "interleaves two lists", "checks whether a number is prime", "finds the most common element",
    "computes the standard deviation", "replaces tabs with spaces", "implements a simple calculator",
    "filters even numbers", "sums the digits of a number", "validates a phone number", "parses a date string",
    "implements a timer decorator", "zips two lists into a dictionary", "finds duplicates in a list",
    "computes the Hamming distance", "implements a trie", "implements a min heap", "solves a quadratic equation",
    "draws a triangle of stars", "converts snake case to camel case", "finds a substring without using find",
    "implements a rate limiter", "retries a function with backoff", "computes the n-th triangular number",
    "multiplies two matrices", "finds the longest word in a sentence", "truncates a string with an ellipsis",
    "finds the closest pair of numbers", "checks if a list is sorted", "counts inversions", "partitions a list",
)
CODE_ASKS = (
    "Write a Python function that {c}.", "Write a Python function that {c}. Include a docstring and an example.",
    "Write a JavaScript function that {c}.", "Implement a function in Java that {c}.",
    "Can you show me code that {c} and explain how it works?", "Write unit tests for a Python function that {c}.",
    "Write a C++ program that {c}.", "Write a small Python class that {c}.",
    "Complete the following Python function, which {c}:\n\n```python\ndef solve(",
)
NAMES = ("Maria", "Ahmed", "Chen", "Olga", "James", "Priya", "Lucas", "Fatima", "Noah", "Yuki", "Sofia", "Ivan")
CITIES = ("Lisbon", "Nairobi", "Oslo", "Lima", "Hanoi", "Toronto", "Cairo", "Dublin", "Osaka", "Prague")
GOODS = ("notebook", "lamp", "keyboard", "backpack", "kettle", "chair", "monitor", "headphones", "desk", "mug")


@dataclass(frozen=True)
class Prompt:
    """A task tag and the user's turn."""

    task: str
    text: str


def _library_functions(rng: random.Random) -> list[tuple[str, str, str]]:
    """Return (source, signature with docstring, docstring) of standard library functions."""
    found: list[tuple[str, str, str]] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):
            continue
        lines = source.splitlines()
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or not (doc := ast.get_docstring(node)):
                continue
            if not 6 <= (node.end_lineno or 0) - node.lineno <= 30 or not 40 <= len(doc) <= 700:
                continue
            body = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            head = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.body[0].end_lineno]))
            if len(body) < 1400:
                found.append((body, head, doc))
    rng.shuffle(found)
    return found


def _library_paragraphs(rng: random.Random) -> list[str]:
    found: list[str] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in [tree, *(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef))]:
            for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
                if 200 <= len(paragraph) <= 900 and ">>>" not in paragraph:
                    found.append(" ".join(paragraph.split()))
    rng.shuffle(found)
    return found


def _record(rng: random.Random) -> dict[str, object]:
    return {
        "id": rng.randrange(1000, 9999), "name": rng.choice(NAMES), "city": rng.choice(CITIES),
        "item": rng.choice(GOODS), "quantity": rng.randrange(1, 9), "price": round(rng.uniform(3, 200), 2),
        "paid": rng.random() < 0.5,
    }  # fmt: skip


def _log_lines(rng: random.Random, count: int) -> str:
    host, level = rng.choice(("api-1", "db-2", "worker-7")), ("INFO", "INFO", "WARN", "ERROR")
    what = ("request served", "cache miss", "retrying connection", "job finished", "slow query")
    return "\n".join(
        f"2031-0{rng.randrange(1, 9)}-1{i % 10} 08:{10 + i}:{rng.randrange(10, 59)} {rng.choice(level)} {host} "
        f"{rng.choice(what)} id={rng.randrange(100, 999)} ms={rng.randrange(2, 400)}"
        for i in range(count)
    )


def _chat(rng: random.Random) -> str:
    t, u = rng.sample(TOPICS, 2)
    return rng.choice(ASKS).format(t=t, u=u)


def _code(rng: random.Random, functions: list[tuple[str, str, str]]) -> str:
    body, head, doc = rng.choice(functions)
    kind = rng.random()
    if kind < 0.55:
        return rng.choice(CODE_ASKS).format(c=rng.choice(CODE_TASKS))
    if kind < 0.7:
        return f"Complete this Python function:\n\n```python\n{head}\n```"
    if kind < 0.8:
        return f"{head}\n"
    if kind < 0.9:
        return f"What does this function do?\n\n```python\n{body}\n```"
    return f"Write a Python function with this description:\n{doc}"


def _edit(rng: random.Random, functions: list[tuple[str, str, str]], paragraphs: list[str]) -> str:
    if rng.random() < 0.6:
        ask = rng.choice((
            "Add type hints to this function.", "Rename the first argument to `value`.", "Add comments to this code.",
            "Remove the docstring.", "Make this function raise ValueError on bad input.", "Add logging.",
        ))  # fmt: skip
        return f"{ask} Return the whole function.\n\n```python\n{rng.choice(functions)[0]}\n```"
    ask = rng.choice((
        "Fix any grammar mistakes in this text", "Rewrite this text in a friendlier tone", "Rewrite in the past tense",
        "Replace every occurrence of 'the' by 'a' in this text",
    ))  # fmt: skip
    return f"{ask}:\n\n{rng.choice(paragraphs)}"


def _text(rng: random.Random, paragraphs: list[str]) -> str:
    ask = rng.choice(("Summarize this text", "What are the key points of this text?", "Shorten this to one sentence"))
    return f"{ask}\n\n{rng.choice(paragraphs)}"


def _data(rng: random.Random) -> str:
    kind = rng.random()
    rows = [_record(rng) for _ in range(rng.randrange(3, 6))]
    if kind < 0.35:
        return "Continue this JSON array with more records:\n\n" + json.dumps(rows, indent=2)[:-2] + ","
    if kind < 0.65:
        return "Continue this log:\n\n" + _log_lines(rng, rng.randrange(5, 10))
    text = " ".join(f"{r['name']} from {r['city']} ordered {r['quantity']} {r['item']} at {r['price']}." for r in rows)
    return f"Extract the orders from this text as JSON with name, city, quantity, item and price:\n\n{text}"


SHARES = {"chat": 0.42, "code": 0.34, "edit": 0.1, "text": 0.06, "data": 0.08}


def training_prompts(count: int, seed: int) -> Iterator[Prompt]:
    """Yield `count` prompts, tasks mixed by SHARES, the same for the same seed."""
    rng = random.Random(seed)
    functions, paragraphs = _library_functions(rng), _library_paragraphs(rng)
    make: dict[str, Callable[[], str]] = {
        "chat": lambda: _chat(rng),
        "code": lambda: _code(rng, functions),
        "edit": lambda: _edit(rng, functions, paragraphs),
        "text": lambda: _text(rng, paragraphs),
        "data": lambda: _data(rng),
    }
    seen: set[str] = set()
    while len(seen) < count:
        task = rng.choices(list(SHARES), list(SHARES.values()))[0]
        text = make[task]()
        if text not in seen:
            seen.add(text)
            yield Prompt(task, text)
