"""The sentences and words of ``builtin:reviews``."""

from __future__ import annotations

ITEMS: dict[str, tuple[str, ...]] = {
    "kettle": ("lid", "handle", "switch", "finish", "cord"),
    "backpack": ("zip", "strap", "lining", "rain cover", "front pocket"),
    "desk lamp": ("shade", "switch", "base", "light", "cable"),
    "headset": ("sound", "microphone", "headband", "cable", "padding"),
    "coffee maker": ("filter", "water tank", "timer", "taste", "hot plate"),
    "bicycle pump": ("hose", "gauge", "handle", "valve", "base"),
    "keyboard": ("layout", "space bar", "cable", "backlight", "stand"),
    "raincoat": ("hood", "zip", "fit", "fabric", "inner pocket"),
    "desk chair": ("seat", "backrest", "armrest", "lever", "fabric"),
    "toaster": ("timer", "crumb tray", "lever", "finish", "cord"),
    "tent": ("ground sheet", "zip", "frame", "entrance", "carry bag"),
    "bedside clock": ("display", "sound", "battery", "menu", "snooze button"),
}
"""What is reviewed, and its parts."""

BLANKS: dict[str, tuple[str, ...]] = {
    "time": ("a week", "two weeks", "a month", "three months", "half a year", "a year"),
    "person": ("my sister", "my father", "a friend", "a neighbour", "my daughter", "a colleague"),
    "place": ("at home", "at work", "on a trip", "in the garden shed", "in my small flat"),
    "shop": ("online", "in a shop nearby", "at a sale", "second-hand", "at a market"),
}

OPENINGS = (
    "I bought this {item} {shop} {time} ago.",
    "We have used the {item} {place} for {time}.",
    "I got the {item} for {person}.",
    "This is my second {item} of this make.",
    "I needed a {item} that I could use {place}.",
    "After {time} with this {item}, here is what I think.",
    "My old {item} broke, so I ordered this one.",
)

ASIDES = (
    "It came in a plain box.",
    "I use it {place}.",
    "It looks like the picture.",
    "We have had it for {time}.",
    "I found it {shop}.",
    "It is about as large as my old one.",
    "There is also a version in grey.",
)

SENTENCES: dict[str, tuple[str, ...]] = {
    "awful": (
        "The {trait} broke on the first day.",
        "The {trait} is the worst I have ever seen.",
        "The {trait} was useless from the start.",
        "I am angry about the {trait}, which fell apart in my hands.",
        "The {trait} is a disgrace, and nobody answered my complaint.",
        "The {trait} never worked, not even once.",
        "After {time} the {trait} was ruined.",
        "The {trait} is so bad that it is dangerous.",
    ),
    "bad": (
        "The {trait} feels cheap.",
        "The {trait} could be much better.",
        "I do not like the {trait}.",
        "The {trait} began to wear after {time}.",
        "The {trait} is a little disappointing.",
        "Sadly the {trait} does not do what it should.",
        "The {trait} is awkward to use.",
        "I expected more of the {trait}.",
        "The {trait} is not very good.",
    ),
    "good": (
        "The {trait} is better than I expected.",
        "I like the {trait}.",
        "The {trait} does what it should.",
        "The {trait} still looks new after {time}.",
        "The {trait} is not bad at all.",
        "The {trait} feels solid.",
        "The {trait} is easy to use.",
        "Even {person} liked the {trait}.",
        "The {trait} works well.",
    ),
    "great": (
        "The {trait} is the best I have ever seen.",
        "The {trait} is simply perfect.",
        "I love the {trait}.",
        "The {trait} is a joy to use every day.",
        "The {trait} could not be better.",
        "Everyone asks me about the wonderful {trait}.",
        "After {time} the {trait} is still flawless.",
        "The {trait} is worth the price alone.",
    ),
}

VERDICTS: dict[int, tuple[str, ...]] = {
    1: ("Stay away from this {item}.", "I want my money back.", "Never again.", "I threw it out."),
    2: ("I would not buy it again.", "I will look for another {item}.", "Not my choice.", "I may send it back."),
    3: ("It is fine for the price, no more.", "It is an average {item}.", "I am in two minds.", "It will do for now."),
    4: ("I would buy it again.", "A good {item} on the whole.", "I am happy with it.", "I can recommend it."),
    5: ("Buy it without a second thought.", "I want another one.", "The best {item} by far.", "I am delighted."),
}
