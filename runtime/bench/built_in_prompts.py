"""The prompts that come with draftgraph, by what their answers are like."""

from __future__ import annotations

ECHO: tuple[tuple[str, str], ...] = (
    (
        "recipe",
        "Write this list again, exactly as it is:\n\n"
        "1. Fill the kettle with fresh cold water.\n"
        "2. Bring the water to a boil.\n"
        "3. Warm the teapot with a little hot water.\n"
        "4. Add one spoon of tea leaves for each cup.\n"
        "5. Pour the boiling water over the leaves.\n"
        "6. Let the tea steep for four minutes.\n"
        "7. Pour the tea through a strainer into the cups.\n"
        "8. Add milk, lemon or sugar to taste.\n",
    ),
    (
        "letter",
        "Copy this letter word for word:\n\n"
        "Dear neighbours,\n\n"
        "On Saturday the water in our street will be turned off from eight in the morning until noon, because a "
        "pipe at the corner has to be replaced. Please fill a few bottles on Friday evening. If the work takes "
        "longer, the company will bring water in a tank. I am sorry for the trouble, and I thank you for your "
        "patience.\n\n"
        "Yours sincerely,\nMargaret Hill\n",
    ),
    (
        "facts",
        "Repeat the following text without changing anything:\n\n"
        "The river Danube rises in the Black Forest and flows for about 2850 kilometres to the Black Sea. It passes "
        "through ten countries, more than any other river in the world. Four capitals lie on it: Vienna, "
        "Bratislava, Budapest and Belgrade. Ships of the inland fleet carry grain, ore and stone along it.\n",
    ),
    (
        "rename",
        "Write this Python function again with the variable `total` renamed to `result`, and nothing else changed:\n\n"
        "def average(values):\n"
        "    total = 0\n"
        "    count = 0\n"
        "    for value in values:\n"
        "        total = total + value\n"
        "        count = count + 1\n"
        "    if count == 0:\n"
        "        return 0\n"
        "    total = total / count\n"
        "    return total\n",
    ),
)
"""Answers that repeat their prompt, as edits, summaries and code changes do: what prompt lookup is best at."""

CHAT: tuple[tuple[str, str], ...] = (
    ("sky", "Why is the sky blue during the day and red in the evening? Explain it to a child."),
    ("plan", "I have one free day in Rome and I like old buildings and good food. What should I do?"),
    ("mail", "Write a short and friendly mail to my landlord: the heating in the bedroom has not worked since Monday."),
    ("compare", "What are the advantages and disadvantages of living in a small town rather than in a large city?"),
)
"""Questions whose answers have little in common with them: what prompt lookup is worst at."""

CODE: tuple[tuple[str, str], ...] = (
    ("primes", "Write a Python function that returns all prime numbers below n, with a docstring and two examples."),
    (
        "stack",
        "Write a Python class `Stack` with the methods push, pop, peek and is_empty, and a short test of each method.",
    ),
    ("csv", "Write a Python script that reads a CSV file and prints the mean of every column that holds numbers."),
    (
        "fix",
        "This function should return the largest value of a list, but it is wrong for negative numbers. Correct it, "
        "and explain the mistake.\n\n"
        "def largest(values):\n"
        "    best = 0\n"
        "    for value in values:\n"
        "        if value > best:\n"
        "            best = value\n"
        "    return best\n",
    ),
)
"""Answers with the regular patterns of program text."""
