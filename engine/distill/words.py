"""The words that training prompts are built from; written here."""

TOPICS = (
    "photosynthesis", "the water cycle", "black holes", "the French Revolution", "machine learning",
    "the stock market", "healthy eating", "yoga", "the Roman Empire", "electric cars", "coffee",
    "the immune system", "volcanoes", "jazz music", "recycling", "time management", "chess",
    "public speaking", "the human heart", "blockchain", "gardening", "climate change", "whales",
    "the moon landing", "sleep", "remote work", "the printing press", "vaccines", "rainforests",
    "meditation", "the theory of evolution", "budgeting", "solar power", "the Great Wall of China",
    "learning a new language", "bees", "databases", "cooking rice", "the Renaissance",
    "earthquakes", "friendship", "operating systems", "running a marathon",
    "impressionist painting", "gravity", "job interviews", "the digestive system", "honey",
    "renewable energy", "computer viruses", "the Silk Road", "antibiotics", "dinosaurs", "poetry",
    "tea", "inflation", "the ozone layer", "cats", "digital photography", "democracy",
    "the periodic table", "online shopping", "bread", "note taking", "DNA",
    "the Industrial Revolution", "swimming", "tides", "urban planning", "sleeping better",
    "negotiation", "origami", "coral reefs", "the speed of light", "chocolate", "airplanes",
    "leadership", "cloud computing", "the nervous system", "hiking", "glaciers",
    "starting a small business", "data privacy", "ancient Egypt", "bicycles", "wind turbines",
    "stress", "the violin", "satellites", "the solar system", "writing a novel", "penguins",
    "fermentation", "robotics", "insurance", "the Olympic Games", "mental health", "bridges",
    "credit scores", "lighthouses", "public libraries", "astronomy", "soil", "open source software",
    "volunteering", "mushrooms", "quantum computing", "railways", "the Great Depression", "owls",
    "interior design", "hydration", "clocks", "the brain", "pottery", "search engines", "deserts",
)  # fmt: skip
ASKS = (
    "Explain {t} to a ten-year-old.", "What are the main benefits of {t}?",
    "Write a short story about {t}.", "Give me five interesting facts about {t}.",
    "What should a beginner know about {t}?", "Write a short poem about {t}.",
    "What are common misconceptions about {t}?", "Summarize the history of {t} in one paragraph.",
    "How does {t} affect everyday life?", "Write a friendly email to a colleague about {t}.",
    "List the pros and cons of {t}.", "I want to learn about {t}. Where should I start?",
    "Why is {t} important?", "Compare {t} with {u}.",
    "Write an introduction for a blog post about {t}.",
    "What are three questions an expert on {t} would ask?", "Describe {t} in simple terms.",
    "Write a dialogue between a teacher and a student about {t}.",
    "Can you outline an essay about {t}?", "Imagine a world without {t}. What would change?",
    "Give step-by-step advice on {t}.", "What is the relationship between {t} and {u}?",
    "Write a product description related to {t}.", "What are the latest challenges in {t}?",
    "Create a quiz with three questions about {t}.",
    "Write a persuasive paragraph on why people should care about {t}.",
    "Define {t} and give an example.", "Make a weekly plan for someone interested in {t}.",
    "What mistakes do people make with {t}?", "Write a speech of about 100 words on {t}.",
    "Tell me something surprising about {t}.",
    "How would you explain {t} to a visitor from the past?",
    "Write a letter to the editor about {t}.", "Act as a travel guide and talk about {t}.",
    "Suggest a title and a plot for a film about {t}.", "What skills are useful for {t}?",
    "Write a review of a book about {t}.",
)  # fmt: skip
CODE_TASKS = (
    "reverses a linked list", "checks whether a string is a palindrome",
    "computes the n-th Fibonacci number", "merges two sorted lists",
    "finds all prime numbers up to n", "counts word frequencies in a text",
    "sorts a list with quicksort", "performs a binary search", "validates an email address",
    "converts Celsius to Fahrenheit", "flattens a nested list",
    "computes the greatest common divisor", "removes duplicates while keeping the order",
    "rotates a matrix by 90 degrees", "parses a CSV file", "finds the longest common prefix",
    "transposes a matrix", "generates all permutations of a list",
    "checks for balanced parentheses", "computes the factorial of a number", "implements a stack",
    "implements a queue with two stacks", "finds the maximum subarray sum", "inverts a binary tree",
    "computes the depth of a binary tree", "encodes a string with run-length encoding",
    "decodes a Caesar cipher", "finds the two numbers that add up to a target",
    "counts vowels in a string", "computes the moving average of a list",
    "groups words by their first letter", "reads a JSON file", "downloads a file from a URL",
    "computes the edit distance of two strings", "finds the median of a list",
    "checks if two strings are anagrams", "converts an integer to a Roman numeral",
    "converts a binary string to an integer", "splits a list into chunks",
    "implements a least recently used cache", "finds the intersection of two lists",
    "computes the dot product of two vectors", "sorts a dictionary by value",
    "capitalizes every word of a sentence", "generates a random password",
    "finds the second largest number", "computes compound interest",
    "checks whether a year is a leap year", "walks a directory tree", "counts the lines of a file",
    "implements depth-first search", "implements breadth-first search",
    "computes the power set of a set", "finds the mode of a list",
    "removes punctuation from a string", "implements bubble sort", "implements merge sort",
    "computes the area of a polygon", "rounds to the nearest ten",
    "finds missing numbers in a sequence", "converts seconds to hours, minutes and seconds",
    "finds the shortest path in a graph", "implements a bank account class", "computes a checksum",
    "interleaves two lists", "checks whether a number is prime", "finds the most common element",
    "computes the standard deviation", "replaces tabs with spaces",
    "implements a simple calculator", "filters even numbers", "sums the digits of a number",
    "validates a phone number", "parses a date string", "implements a timer decorator",
    "zips two lists into a dictionary", "finds duplicates in a list",
    "computes the Hamming distance", "implements a trie", "implements a min heap",
    "solves a quadratic equation", "draws a triangle of stars", "converts snake case to camel case",
    "finds a substring without using find", "implements a rate limiter",
    "retries a function with backoff", "computes the n-th triangular number",
    "multiplies two matrices", "finds the longest word in a sentence",
    "truncates a string with an ellipsis", "finds the closest pair of numbers",
    "checks if a list is sorted", "counts inversions", "partitions a list",
)  # fmt: skip
CODE_ASKS = (
    "Write a Python function that {c}.",
    "Write a Python function that {c}. Include a docstring and an example.",
    "Write a JavaScript function that {c}.", "Implement a function in Java that {c}.",
    "Can you show me code that {c} and explain how it works?",
    "Write unit tests for a Python function that {c}.", "Write a C++ program that {c}.",
    "Write a small Python class that {c}.",
    "Complete the following Python function, which {c}:\n\n```python\ndef solve(",
)  # fmt: skip
NAMES = (
    "Maria", "Ahmed", "Chen", "Olga", "James", "Priya", "Lucas", "Fatima", "Noah", "Yuki", "Sofia",
    "Ivan",
)  # fmt: skip
CITIES = (
    "Lisbon", "Nairobi", "Oslo", "Lima", "Hanoi", "Toronto", "Cairo", "Dublin", "Osaka", "Prague",
)  # fmt: skip
GOODS = (
    "notebook", "lamp", "keyboard", "backpack", "kettle", "chair", "monitor", "headphones", "desk",
    "mug",
)  # fmt: skip
EDIT_CODE_ASKS = (
    "Add type hints to this function.", "Rename the first argument to `value`.",
    "Add comments to this code.", "Remove the docstring.",
    "Make this function raise ValueError on bad input.", "Add logging.",
)  # fmt: skip
EDIT_TEXT_ASKS = (
    "Fix any grammar mistakes in this text", "Rewrite this text in a friendlier tone",
    "Rewrite in the past tense", "Replace every occurrence of 'the' by 'a' in this text",
)  # fmt: skip
TEXT_ASKS = (
    "Summarize this text", "What are the key points of this text?", "Shorten this to one sentence",
)  # fmt: skip
ROLES = (
    "a pirate captain", "a strict librarian", "a cheerful robot", "a medieval blacksmith",
    "a nutritionist", "a detective in the 1930s", "a football coach", "an old lighthouse keeper",
    "a science fiction author", "a kindergarten teacher", "a sceptical physicist", "a tour guide",
    "a career adviser", "a film critic", "a gardener", "a lawyer", "a chef", "a ghost",
    "a talking cat", "a mountain climber", "a database administrator", "a poet", "a diplomat",
)  # fmt: skip
PLACES = (
    "Norway", "Kyoto", "Morocco", "the Alps", "Mexico City", "Iceland", "Rome", "Cape Town",
    "New Zealand", "Istanbul", "Patagonia", "Vienna", "Bali", "Scotland", "Jaipur", "Havana",
)  # fmt: skip
EVENTS = (
    "a delayed order", "a job offer", "a birthday party", "a broken washing machine", "a promotion",
    "a neighbour's loud music", "a lost suitcase", "a team meeting", "a scholarship", "a refund",
    "a wedding invitation", "moving to another town", "a data breach", "an overdue invoice",
    "a school trip", "a surprise visit", "a missed deadline", "a charity run", "a new colleague",
)  # fmt: skip
FEELINGS = (
    "nervous about an exam", "bored at work", "lonely in a new city", "tired all the time",
    "stuck on a project", "afraid of flying", "proud of a friend", "unsure which car to buy",
    "overwhelmed by email", "angry at a flatmate", "worried about money", "short of ideas",
)  # fmt: skip
THINGS = (
    "a bicycle", "a smartphone", "an umbrella", "a wooden table", "a refrigerator", "a piano",
    "a tent", "a camera", "a bookshelf", "a coffee machine", "a pair of running shoes", "a clock",
)  # fmt: skip
CLAIMS = (
    "Schools should start later in the morning", "Everyone should learn to program",
    "Cities should ban cars from their centres", "Working from home makes people happier",
    "Zoos should be closed", "Social media does more harm than good", "Homework is useless",
    "Space exploration is worth its cost", "A four-day week is better for everyone",
    "Books are better than films", "Tourism ruins beautiful places", "Exams should be abolished",
)  # fmt: skip
SUBJECTS = (
    "inertia", "supply and demand", "a recursive function", "osmosis", "the Doppler effect",
    "opportunity cost", "a prime number", "natural selection", "an API", "the placebo effect",
    "entropy", "a constitution", "compound interest", "a catalyst", "a metaphor", "radioactivity",
    "plate tectonics", "a hash table", "inflation targeting", "the greenhouse effect", "a vector",
    "the scientific method", "a black swan event", "a neuron", "an eclipse", "probability",
    "a covalent bond", "a compiler", "the Cold War", "a monopoly", "a derivative", "erosion",
)  # fmt: skip
