"""The builtin prompt set: our own prompts, so that a benchmark needs no data.

Five kinds, in turn, so that the first few are a fair sample of all. What is to be summarised, or taken out of a text,
stands in the prompt: these are the kinds where an answer repeats what was asked.
"""

from __future__ import annotations

CHAT = (
    "Explain to a ten-year-old why the moon changes its shape over a month.",
    "I have two hours in a city I do not know, and it rains. What could I do?",
    "Write a friendly message to a neighbour whose dog barks every night.",
    "What are the three best arguments for learning to cook, and the best one against it?",
    "Tell a short story about a lighthouse keeper who finds a letter in a bottle.",
    "How do I keep basil alive in a kitchen with little light?",
    "Compare trains and buses for a trip of 300 kilometres, in a short list.",
)
CODE = (
    "Write a Python function that merges two sorted lists into one sorted list, with a docstring and two examples.",
    "Write a Python class `Stack` with push, pop, peek and is_empty, and a short test of each method.",
    "Explain what this code does, then rewrite it without the loop:\n\n"
    "total = 0\nfor number in numbers:\n    if number % 2 == 0:\n        total += number * number\nprint(total)",
    "Write an SQL query that lists every customer with the number of orders and the sum of their amounts, "
    "largest sum first. The tables are customers(id, name) and orders(id, customer_id, amount).",
    "Write a Python function that reads a CSV file and returns a list of dictionaries, without the csv module.",
    "Here is a function:\n\ndef area(shape, a, b):\n    if shape == 'rectangle':\n        return a * b\n"
    "    if shape == 'triangle':\n        return a * b / 2\n\n"
    "Add the shapes 'square' and 'ellipse', and an error for an unknown shape. Print the whole function.",
    "Write HTML for a page with a heading, a table of three fruits and their prices, and a footer.",
)
MATHS = (
    "A shop sells pens at 3 for 2 euros. How much do 18 pens cost? Think step by step.",
    "A train leaves at 9:40 and arrives at 13:05. How long is the trip, and when would it arrive if it were 25 minutes "
    "late?",
    "Anna is twice as old as Ben. In six years their ages add up to 45. How old are they now? Show the equations.",
    "Find all prime numbers between 50 and 80, and say for each number in between what divides it.",
    "A rectangle is 4 cm longer than it is wide, and its area is 96 square centimetres. How long are its sides?",
    "Compute 17 * 23 in three different ways, and check that they agree.",
)
TEXTS = (
    "The town council met on Tuesday to decide about the old bridge. Engineers had found cracks in two of its four "
    "pillars, and said that lorries should no longer use it. Shop owners on the north bank fear that deliveries will "
    "take half an hour longer. The council decided to close the bridge for lorries from May, to repair the two pillars "
    "over the summer, and to pay for a ferry on market days. The repairs cost 1.2 million, of which the region pays "
    "half. A new bridge would have cost nine million, the mayor said, and would have taken four years.",
    "Bees find their way by the sun. A bee that has found flowers returns to the hive and dances on the comb: it runs "
    "in a straight line, shakes its body, and walks back in a curve. The angle between the line and straight up is the "
    "angle between the flowers and the sun. The longer the run, the farther away the flowers are. Other bees follow "
    "the dancer in the dark and feel its movements. Then they fly out and find the place, often several kilometres "
    "away, although they have never been there.",
    "The company Holm & Daughters has made wooden boats since 1921. In the nineties it nearly closed, because plastic "
    "boats were cheaper. Since then orders have grown every year. A third of the boats goes abroad. The firm employs "
    "34 people, nine of them apprentices, and builds 20 boats a year. The oak comes from forests within 50 kilometres. "
    "The present owner, Karin Holm, wants to stay small: every boat, she says, should be seen by one person from its "
    "first plank to its first trip on the water.",
)
SUMMARISING = (
    *(f"Summarise this text in two sentences.\n\n{text}" for text in TEXTS),
    *(f"Write a headline and three bullet points for this text.\n\n{text}" for text in TEXTS),
)
RECORDS = (
    "Order 1042, 3 March, Lena Brandt, 2 lamps and 1 desk, paid by card. Order 1043, 3 March, Omar Said, 4 chairs, "
    "paid by invoice. Order 1044, 5 March, Lena Brandt, 1 lamp, returned. Order 1045, 6 March, Yuki Tanaka, 1 desk, "
    "paid by card.",
    "The meeting starts at 9:30 in room 214 with Dr Osei and Ms Lindqvist. At 11:00 there is a visit to the laboratory "
    "in building C, led by Mr Petrov. Lunch is at 12:15 in the garden. In the afternoon, from 14:00 to 16:45, Ms Chen "
    "presents the budget in room 105.",
    "Copper melts at 1085 degrees Celsius and has a density of 8.96 grams per cubic centimetre. Iron melts at 1538 "
    "degrees, with a density of 7.87. Aluminium melts at 660 degrees and has a density of 2.70, tin at 232 degrees "
    "with 7.26, and gold at 1064 degrees with 19.3.",
)
EXTRACTION = (
    *(f"Turn what this text says into a Markdown table.\n\n{text}" for text in RECORDS),
    *(f"Write everything in this text as a JSON list of objects.\n\n{text}" for text in RECORDS),
)

KINDS = {"chat": CHAT, "code": CODE, "maths": MATHS, "summarising": SUMMARISING, "extraction": EXTRACTION}


def builtin() -> list[tuple[str, str]]:
    """(kind, prompt), the kinds in turn."""
    longest = max(map(len, KINDS.values()))
    return [(kind, prompts[i]) for i in range(longest) for kind, prompts in KINDS.items() if i < len(prompts)]
