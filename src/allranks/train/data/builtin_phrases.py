"""The ways in which ``builtin:instructions`` words its questions.

Blanks stand in braces. What stands behind ``|`` becomes the row's ``input``; wordings without it have an empty one.
"""

from __future__ import annotations

OPPOSITE = (
    "What is the opposite of {x}?",
    "Name the opposite of {x}.",
    "Give the opposite of the word {x}.",
    "Which word means the opposite of {x}?",
    "What is an antonym of {x}?",
    "Tell me the opposite of {x}.",
    "Give the opposite of the word.|{x}",
    "What is the opposite of this word?|{x}",
    "Write the antonym.|{x}",
    "Turn the word into its opposite.|{x}",
)
CAPITAL = (
    "What is the capital of {x}?",
    "Name the capital of {x}.",
    "Which city is the capital of {x}?",
    "Tell me the capital city of {x}.",
    "What is the capital city of {x}?",
    "What is {x}'s capital?",
    "{x} has which city as its capital?",
    "Give the capital of the country.|{x}",
    "What is the capital of this country?|{x}",
    "Name the capital city.|{x}",
    "Which city is the capital?|{x}",
)
COUNTRY = (
    "Which country has {x} as its capital?",
    "{x} is the capital of which country?",
    "Name the country whose capital is {x}.",
    "What country is {x} the capital of?",
    "Tell me the country whose capital city is {x}.",
    "Of which country is {x} the capital?",
    "The city of {x} is the capital of which country?",
    "Name the country of this capital.|{x}",
    "Which country has this capital?|{x}",
    "Give the country for the capital city.|{x}",
)
COLOUR = (
    "What colour is {x}?",
    "Name the usual colour of {x}.",
    "Which colour does {x} have?",
    "Tell me the colour of {x}.",
    "What is the colour of {x}?",
    "What is the usual colour of {x}?",
    "In which colour would you paint {x}?",
    "Give the usual colour.|{x}",
    "What colour is this?|{x}",
    "Name its colour.|{x}",
)
KIND = (
    "What kind of thing is {ax}?",
    "Which group does {ax} belong to?",
    "Name the group that {ax} belongs to.",
    "To what kind of things does {ax} belong?",
    "Put {ax} into a group.",
    "In which group would you put {ax}?",
    "Tell me what kind of thing {ax} is.",
    "What kind of thing is this?|{x}",
    "Name the group.|{x}",
    "Put the word into a group.|{x}",
    "Which group does the word belong to?|{x}",
)
IS_KIND = (
    "Does {ax} belong to the group {k}? Answer yes or no.",
    "Is {ax} in the group {k}? Answer yes or no.",
    "Yes or no: {ax} belongs to the group {k}.",
    "Would you put {ax} into the group {k}? Answer yes or no.",
    "Does the word belong to the group {k}? Answer yes or no.|{x}",
    "Is this in the group {k}? Answer yes or no.|{x}",
)
PICK_KIND = (
    "Which word belongs to the group {k}?|{list}",
    "Find the word of the group {k}.|{list}",
    "Which of these is in the group {k}?|{list}",
    "Pick the one that belongs to the group {k}.|{list}",
    "Which of these words belongs to the group {k}: {list}?",
    "Pick the word of the group {k}: {list}.",
)
COMPARE_NUMBERS = (
    "Which is {more}, {a} or {b}?",
    "Which number is {more}, {a} or {b}?",
    "Name the {more} number: {a} or {b}.",
    "Of {a} and {b}, which is {more}?",
    "Write down the {more} of {a} and {b}.",
    "Which number is {more}?|{a}, {b}",
    "Give the {more} number.|{a}, {b}",
    "Pick the {more} of the two numbers.|{a} and {b}",
)
COMPARE_ANIMALS = (
    "Which animal is {more}, {a} or {b}?",
    "Which is {more}, {a} or {b}?",
    "Name the {more} animal: {a} or {b}.",
    "Of {a} and {b}, which is {more}?",
    "Tell me which animal is {more}: {a} or {b}.",
    "Which animal is {more}?|{a}, {b}",
    "Give the {more} animal.|{a}, {b}",
    "Pick the {more} of the two animals.|{a} and {b}",
)
SUM = (
    "What is {a} + {b}?",
    "What is {a} plus {b}?",
    "Add {a} and {b}.",
    "How much is {a} and {b} together?",
    "Give the sum of {a} and {b}.",
    "Compute {a} + {b}.",
    "{a} + {b} =",
    "Add the two numbers.|{a}, {b}",
    "Compute the sum.|{a} + {b}",
    "What do the numbers add up to?|{a} and {b}",
)
DIFFERENCE = (
    "What is {a} - {b}?",
    "What is {a} minus {b}?",
    "Take {b} away from {a}.",
    "Subtract {b} from {a}.",
    "How much is left of {a} after taking away {b}?",
    "Compute {a} - {b}.",
    "{a} - {b} =",
    "Subtract the second number from the first.|{a}, {b}",
    "Compute the difference.|{a} - {b}",
)
COUNT = (
    "How many words are in the list?|{list}",
    "Count the words.|{list}",
    "How many things are listed?|{list}",
    "Give the number of words.|{list}",
    "How many words are here: {list}?",
    "Count these words: {list}.",
)
FIRST = (
    "What is the first word of the list?|{list}",
    "Give the first word.|{list}",
    "Which word comes first?|{list}",
    "Write the word at the beginning of the list.|{list}",
    "Which word comes first: {list}?",
    "Name the first of these words: {list}.",
)
LAST = (
    "What is the last word of the list?|{list}",
    "Give the last word.|{list}",
    "Which word comes last?|{list}",
    "Write the word at the end of the list.|{list}",
    "Which word comes last: {list}?",
    "Name the last of these words: {list}.",
)
MEMBER = (
    "Is {x} in the list? Answer yes or no.|{list}",
    "Does the list contain {x}? Answer yes or no.|{list}",
    "Yes or no: the list has the word {x}.|{list}",
    "Can you find {x} here? Answer yes or no.|{list}",
    "Is {x} one of these words: {list}? Answer yes or no.",
)
PLURAL = (
    "What is the plural of {x}?",
    "Give the plural of {x}.",
    "Write the plural of the noun {x}.",
    "One {x}, two of what?",
    "Tell me the plural form of {x}.",
    "What do you call more than one {x}?",
    "Write the plural.|{x}",
    "Give the plural of this noun.|{x}",
    "Turn the word into its plural.|{x}",
)
PAST = (
    "What is the past tense of {x}?",
    "Give the past tense of {x}.",
    "Write the past tense of the verb {x}.",
    "Put the verb {x} into the past tense.",
    "Today I {x}. What did I do yesterday?",
    "Tell me the simple past of {x}.",
    "Write the past tense.|{x}",
    "Give the simple past of this verb.|{x}",
    "Put the verb into the past tense.|{x}",
)
LETTER = (
    "What is the {place} letter of {x}?",
    "Which letter does {x} {verb} with?",
    "Give the {place} letter of the word {x}.",
    "Name the letter that {x} {verb}s with.",
    "Write the {place} letter.|{x}",
    "Which letter does this word {verb} with?|{x}",
    "What is the {place} letter of the word?|{x}",
)
NEXT_DAY = (
    "Which day comes {side} {x}?",
    "What day is {side} {x}?",
    "Name the day right {side} {x}.",
    "Tell me which day comes just {side} {x}.",
    "Give the day that comes {side} {x}.",
    "Which day of the week comes {side} this one?|{x}",
    "Name the day {side} this day.|{x}",
)
NEXT_MONTH = tuple(wording.replace("day of the week", "month").replace("day", "month") for wording in NEXT_DAY)
NEXT_NUMBER = (
    "Which number comes right {side} {x}?",
    "What number is just {side} {x}?",
    "Name the number right {side} {x}.",
    "Counting up, what comes {side} {x}?",
    "Give the whole number just {side} this one.|{x}",
    "Which number comes right {side} it?|{x}",
)

ENDINGS = (" Answer in one word.", " Give only the answer.", " Keep it short.")
"""What may follow a question that does not say how to answer."""
