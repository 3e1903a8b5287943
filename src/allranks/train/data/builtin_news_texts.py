"""The sentences and words of ``builtin:news``. Companies, clubs and people are made up."""

from __future__ import annotations

WORLD, SPORTS, BUSINESS, SCIENCE = CLASSES = (1, 2, 3, 4)

BLANKS: dict[str, tuple[str, ...]] = {
    "city": ("Lisbon", "Nairobi", "Ankara", "Toronto", "Osaka", "Lima", "Prague", "Cairo", "Seoul", "Geneva", "Riga"),
    "city2": ("Madrid", "Accra", "Oslo", "Boston", "Hanoi", "Bogota", "Vienna", "Tunis", "Delhi", "Dublin", "Perth"),
    "name": ("Arlen", "Bekele", "Castro", "Dahl", "Eriksen", "Fontaine", "Gupta", "Haddad", "Ivanova", "Jansen", "Kim"),
    "day": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"),
    "few": ("two", "three", "four", "five", "six", "seven", "nine"),
    "many": ("12", "15", "18", "24", "30", "36", "45", "60"),
    "country": ("Portugal", "Kenya", "Turkey", "Canada", "Japan", "Peru", "Egypt", "Norway", "Chile", "Ghana"),
    "group": ("ministers", "diplomats", "lawmakers", "aid workers", "election observers", "opposition leaders"),
    "unrest": ("border dispute", "election", "ceasefire", "strike", "flood", "earthquake", "refugee crisis", "protest"),
    "office": ("president", "prime minister", "foreign minister", "mayor", "opposition leader"),
    "team": ("Rovers", "Harbour City", "the Falcons", "North End", "the Comets", "United Lakes", "the Mariners"),
    "team2": ("Albion", "the Wolves", "Southport", "the Royals", "Riverside", "the Pioneers", "Old Town"),
    "sport": ("football", "tennis", "cycling", "rowing", "hockey", "basketball", "athletics"),
    "role": ("captain", "coach", "goalkeeper", "striker", "defender", "champion"),
    "match": ("final", "semi-final", "opening match", "derby", "away game", "play-off"),
    "firm": ("Brightwater", "Calder", "Norvane", "Hexley Group", "Palto", "Ostrander", "Velden"),
    "trade": ("bank", "retailer", "carrier", "lender", "brewer", "car maker", "fuel producer"),
    "figure": ("quarterly profit", "sales", "annual revenue", "the share price", "operating costs", "orders"),
    "boss": ("chief executive", "chairman", "finance chief", "largest shareholder"),
    "lab": ("the Halden Institute", "Westmere University", "the Corvan laboratory", "the polar survey", "Tern Labs"),
    "finding": ("a distant planet", "a deep-sea worm", "a sleeping volcano", "an early galaxy", "a rare orchid"),
    "device": ("phone", "laptop", "telescope", "battery", "satellite", "robot", "search engine", "processor"),
    "bug": ("software flaw", "computer virus", "data leak", "memory fault", "browser bug"),
    "method": ("a new sensor", "satellite images", "gene sequencing", "a faster algorithm", "machine learning"),
}

TITLES: dict[int, tuple[str, ...]] = {
    WORLD: (
        "{country} votes after {unrest}",
        "{group} meet in {city} over {unrest}",
        "{office} of {country} calls for calm",
        "talks on {country} {unrest} resume in {city}",
        "thousands march in {city}",
        "{country} and its neighbours sign accord",
        "{few} hurt near {city} as {unrest} goes on",
    ),
    SPORTS: (
        "{team} beat {team2} in {match}",
        "{name} leads {team} to late win",
        "{team2} lose {role} before {match}",
        "{city} prepares for {sport} {match}",
        "{name} wins {sport} title in {city}",
        "{role} {name} returns for {team}",
        "{team} drop points in {city}",
    ),
    BUSINESS: (
        "{firm} lifts forecast for {figure}",
        "{trade} {firm} cuts {many} jobs",
        "shares of {firm} fall in {city}",
        "{firm} bids for rival {trade}",
        "{boss} of {firm} to leave",
        "{figure} up at {firm}",
        "investors wait for {firm} results",
    ),
    SCIENCE: (
        "scientists report {finding}",
        "new {device} goes on sale in {city}",
        "{bug} hits {device} makers",
        "{lab} tests {method}",
        "{device} finds {finding}",
        "{method} may help study of {finding}",
        "{bug} fixed after {few} weeks",
    ),
}

ANY_TITLES = (
    "{name} steps down after {few} years",
    "{city} deal nears its end",
    "a long day in {city}",
    "{name} promises a new start in {city}",
    "{few} questions for {name}",
    "hopes rise in {city2} before {day}",
    "record numbers in {city}",
    "{city} waits for a decision on {day}",
)

LEADS: dict[int, tuple[str, ...]] = {
    WORLD: (
        "{group} from {few} countries met in {city} on {day} to discuss the {unrest} in {country}.",
        "the {office} of {country} said on {day} that the {unrest} would not delay a vote in parliament.",
        "at least {many} people were hurt near {city2} during the {unrest}, officials said on {day}.",
        "{country} has agreed to open its border to {group} after {few} days of talks.",
        "police in {city} held {many} people on {day} as a protest over the {unrest} turned violent.",
        "the {office}, {name}, won {many} percent of the vote in {country}, early counts show.",
        "troops left {city2} on {day} under a peace plan backed by {country}.",
        "a court in {city} ordered {office} {name} to answer questions about the {unrest}.",
    ),
    SPORTS: (
        "{team} beat {team2} {few} to one on {day} and moved to the top of the table.",
        "{role} {name} scored twice as {team} came from behind to win the {match} in {city}.",
        "{name} will miss the {match} against {team2} with a knee injury, the {role} said on {day}.",
        "{team} have lost {few} games in a row and may look for a new {role} before the season ends.",
        "{name} won the {sport} title in {city} on {day} after {many} minutes of play.",
        "a crowd of {many} thousand saw {team2} draw the {match} in {city2}.",
        "the {sport} federation gave {name} a {few}-month ban after the {match} in {city2}.",
        "{team} signed {role} {name} from {team2} on {day} for the rest of the season.",
    ),
    BUSINESS: (
        "{firm}, a {trade} based in {city}, said on {day} that {figure} rose {many} percent.",
        "shares of {firm} lost {many} percent on {day} after the {trade} warned about {figure}.",
        "{trade} {firm} plans to close {few} plants near {city2} to bring down costs.",
        "the {boss} of {firm}, {name}, will leave in {few} months, the {trade} said.",
        "{firm} agreed to buy a smaller {trade} for {many} million in cash and shares.",
        "oil prices and a weak dollar held back {figure} at {firm}, analysts in {city} said.",
        "banks in {city2} raised their view of {firm} after {figure} beat forecasts on {day}.",
        "the central bank in {city} left interest rates alone for the {few} months to come.",
    ),
    SCIENCE: (
        "researchers at {lab} used {method} to describe {finding} in a study out on {day}.",
        "a {bug} in a popular {device} lets attackers read private files, {lab} said on {day}.",
        "the new {device} runs {few} times faster and goes on sale in {city} on {day}.",
        "{lab} has built a {device} that weighs only {many} grams.",
        "{name} of {lab} said {method} could show how {finding} changed over {many} thousand years.",
        "users of the {device} should install an update on {day} to close a {bug}.",
        "a {device} launched from {country} will look for {finding} for {few} years.",
        "{method} helped a team in {city2} to map {finding} for the first time.",
    ),
}

BETWEEN: dict[tuple[int, int], tuple[str, ...]] = {
    (WORLD, BUSINESS): (
        "{country} and {few} neighbours agreed in {city} on {day} to lower taxes on oil and grain.",
        "workers at {firm} began a strike in {city2} that the {office} called a danger to {country}.",
    ),
    (WORLD, SPORTS): (
        "{country} said on {day} that it may not send a team to the games in {city2}.",
        "police in {city} will add {many} officers for the {sport} {match} after a protest.",
    ),
    (WORLD, SCIENCE): (
        "{country} will share its {device} data with {few} neighbours after the flood near {city2}.",
        "a {bug} stopped the count of votes in {city} for {few} hours on {day}.",
    ),
    (SPORTS, BUSINESS): (
        "{firm} will pay {many} million to put its name on the ground of {team}.",
        "the {boss} of {firm} wants to buy {team} before the season starts in {city}.",
    ),
    (SPORTS, SCIENCE): (
        "{team} tested a {device} from {lab} that warns a {role} before an injury.",
        "{lab} used {method} to study how {name} trains for the {match} in {city2}.",
    ),
    (BUSINESS, SCIENCE): (
        "{firm} sold {many} percent more of its new {device} than analysts in {city} had forecast.",
        "a {bug} cost {firm} {many} million and {few} days of work, the {boss} said.",
    ),
}

FOLLOW_UPS = (
    "{name} declined to comment.",
    "more details are expected on {day}.",
    "it has happened {few} times this year, a spokesman said.",
    '"we did what we could," {name} said in {city}.',
    "the news was met with surprise in {city2}.",
    "a decision may take another {few} weeks.",
    '"nobody expected this," said {name}.',
    "officials in {city2} gave no further reason.",
    "the plan was first reported by a newspaper in {city}.",
    "about {many} people followed the announcement in {city2}.",
)
