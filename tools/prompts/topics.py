"""Requests of the ordinary kind: forms of asking, and what is asked about."""

from __future__ import annotations

TOPICS = tuple(
    part.strip()
    for part in """
    the water cycle; photosynthesis; black holes; volcanoes; the human heart; vaccines; gravity;
    the Roman Empire; the French Revolution; the Industrial Revolution; the moon landing; democracy;
    inflation; supply and demand; climate change; renewable energy; recycling; electric cars;
    machine learning; neural networks; databases; the internet; encryption; operating systems;
    recursion; sorting algorithms; version control; unit testing; cloud computing; open source;
    healthy eating; sleep; regular exercise; yoga; meditation; stress; running a marathon; cycling;
    learning to swim; gardening; growing tomatoes; keeping bees; baking bread; making pizza;
    cooking rice; brewing coffee; green tea; chess; playing the guitar; learning the piano;
    painting; photography; creative writing; poetry; reading more books; public speaking;
    job interviews;
    writing a cover letter; time management; teamwork; leadership; negotiation; saving money;
    starting a small business; working from home; moving to a new city; travelling by train;
    a weekend in Paris; visiting Japan; hiking in the mountains; camping; the ocean; coral reefs;
    whales; dolphins; elephants; penguins; owls; cats; dogs; horses; bees; butterflies; dinosaurs;
    rainforests; deserts; rivers; rain; snow; the seasons; the solar system; Mars; stars; comets;
    light; sound; magnets; electricity; batteries; bridges; airplanes; bicycles; clocks; maps;
    mathematics; fractions; prime numbers; probability; statistics; geometry; algebra; calculus;
    learning a new language; the English alphabet; grammar; spelling; history; geography; music;
    jazz; opera; theatre; films; museums; architecture; fashion; friendship; kindness; honesty;
    courage; patience; family; birthdays; weddings; holidays; school; homework; universities;
    teachers; doctors; nurses; farmers; firefighters; scientists; Albert Einstein; Marie Curie;
    Leonardo da Vinci; William Shakespeare; Ada Lovelace; Isaac Newton; Charles Darwin; football;
    basketball; tennis; swimming; the Olympic Games; first aid; brushing teeth; vitamins; allergies;
    the immune system; the brain; memory; dreams; habits; happiness; robots; smartphones;
    social media; online privacy; passwords; email; spreadsheets; video games; board games
    """.replace("\n", " ").split(";")
)

ABOUT = (
    "Explain {a} in simple terms.",
    "What is the most important thing to know about {a}?",
    "Write a short paragraph about {a}.",
    "Give me five facts about {a}.",
    "Give me three tips about {a} for a beginner.",
    "Write a short story about {a}.",
    "Write a poem about {a}.",
    "How would you explain {a} to a ten-year-old child?",
    "What are the advantages and disadvantages of {a}?",
    "Why does {a} matter?",
    "Make a list of ten words that have to do with {a}.",
    "Write three quiz questions about {a}, with their answers.",
    "Write an email to a friend about {a}.",
    "Summarize what is known about {a} in three sentences.",
    "I want to learn more about {a}. Where should I start?",
    "Write the introduction of an essay about {a}.",
    "Write a conversation between two people who talk about {a}.",
    "What are common misunderstandings about {a}?",
    "Can you give me a step-by-step guide to {a}?",
    "Write a title and an outline for a talk about {a}.",
    "hi, can you help me with something about {a}?",
    "Tell me something surprising about {a}.",
    "Write a product description for something that has to do with {a}.",
    "What questions should I ask an expert on {a}?",
)

PAIRS = (
    "What do {a} and {b} have in common?",
    "Write a short story in which {a} and {b} play a part.",
    "Compare {a} with {b}.",
    "Which is harder to understand, {a} or {b}? Explain your answer.",
    "Write a poem that mentions {a} and {b}.",
    "Make a table of the differences between {a} and {b}.",
    "I have one hour. Should I spend it on {a} or on {b}?",
    "Write a dialogue between someone who likes {a} and someone who prefers {b}.",
)

PROGRAMS = (
    "reverses a string",
    "checks whether a number is prime",
    "counts the words in a text",
    "computes the factorial of a number",
    "finds the largest number in a list",
    "removes duplicates from a list",
    "merges two sorted lists",
    "sorts a list of dictionaries by a key",
    "reads a CSV file and prints its rows",
    "writes a list of lines to a file",
    "computes the Fibonacci numbers",
    "checks whether a string is a palindrome",
    "converts Celsius to Fahrenheit",
    "flattens a nested list",
    "finds the common elements of two lists",
    "computes the mean and the median of a list",
    "counts how often each letter occurs",
    "implements binary search",
    "implements a stack",
    "implements a queue with two stacks",
    "implements a linked list",
    "walks through a binary tree in order",
    "parses a date",
    "generates a random password",
    "validates an email address",
    "downloads a file",
    "transposes a matrix",
    "multiplies two matrices",
    "finds the shortest path in a graph",
    "rotates a list by k places",
    "groups words that are anagrams",
    "converts a number to Roman numerals",
    "computes the greatest common divisor",
    "plays rock, paper, scissors",
    "simulates throwing dice",
    "prints a multiplication table",
    "finds all files with a given suffix",
    "measures how long a function takes",
    "caches the results of a function",
    "splits a list into chunks",
    "computes compound interest",
    "draws a histogram with text",
    "encodes a text with the Caesar cipher",
    "checks balanced brackets",
)

LANGUAGES = ("Python", "Python", "Python", "JavaScript", "C", "Java", "SQL", "Bash")
CODE_FORMS = (
    "Write a {language} function that {task}.",
    "Write a {language} program that {task}, and explain how it works.",
    "How do I write code in {language} that {task}?",
    "Show me an example in {language} that {task}. Add comments.",
    "Write a {language} function that {task}, with tests.",
)
