"""The facts and words behind ``builtin:instructions``. Every question they give has exactly one right answer."""

from __future__ import annotations


def words(text: str) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(text.split())


def pairs(text: str) -> tuple[tuple[str, str], ...]:
    """``"a/b c/d"`` as pairs; an underscore stands for a space."""
    split = (word.replace("_", " ").split("/") for word in text.split())
    return tuple((left, right) for left, right in split)


OPPOSITES = pairs(
    """hot/cold big/small fast/slow up/down inside/outside day/night early/late happy/sad high/low loud/quiet
    near/far ancient/modern rich/poor strong/weak smooth/rough true/false wet/dry wide/narrow full/empty
    clean/dirty cheap/expensive deep/shallow win/lose push/pull buy/sell north/south east/west above/below
    before/after safe/dangerous"""
)

CAPITALS = pairs(
    """France/Paris Germany/Berlin Italy/Rome Spain/Madrid Japan/Tokyo China/Beijing Egypt/Cairo Greece/Athens
    Norway/Oslo Sweden/Stockholm Finland/Helsinki Poland/Warsaw Portugal/Lisbon Austria/Vienna Hungary/Budapest
    Ireland/Dublin Russia/Moscow Canada/Ottawa Cuba/Havana Peru/Lima Kenya/Nairobi Thailand/Bangkok Vietnam/Hanoi
    Denmark/Copenhagen Belgium/Brussels Iran/Tehran Iraq/Baghdad Turkey/Ankara Ghana/Accra Nepal/Kathmandu"""
)

COLOURS = pairs(
    """a_ripe_banana/yellow a_lemon/yellow a_sunflower/yellow an_egg_yolk/yellow grass/green spinach/green
    a_cucumber/green an_emerald/green broccoli/green snow/white milk/white salt/white a_polar_bear/white
    cotton/white coal/black tar/black a_raven/black soot/black blood/red a_ripe_tomato/red a_strawberry/red
    a_ruby/red a_cherry/red a_carrot/orange a_pumpkin/orange a_tangerine/orange a_flamingo/pink a_sapphire/blue
    the_clear_sky/blue lavender/purple an_amethyst/purple chocolate/brown cinnamon/brown mud/brown"""
)

KINDS: dict[str, tuple[str, ...]] = {
    "animal": words("dog cat horse lion tiger sheep"),
    "fruit": words("apple pear grape cherry melon mango"),
    "vegetable": words("carrot onion potato cabbage spinach radish"),
    "tool": words("hammer saw drill wrench chisel rasp"),
    "vehicle": words("car bus truck train bicycle tram"),
    "instrument": words("piano violin guitar flute drum trumpet"),
    "garment": words("shirt coat scarf sweater glove sock"),
    "drink": words("coffee tea milk juice water lemonade"),
    "metal": words("iron copper silver gold zinc lead"),
    "furniture": words("table chair sofa desk shelf bed"),
}
KIND_OF = {thing: kind for kind, things in KINDS.items() for thing in things}
THINGS = tuple(KIND_OF)
LISTED = tuple(thing for things in KINDS.values() for thing in things[:3])
"""The words that lists are made of, and whose letters are asked for."""

PLURALS = pairs(
    """dog/dogs cat/cats apple/apples car/cars shirt/shirts piano/pianos hammer/hammers onion/onions bird/birds
    train/trains box/boxes fox/foxes bus/buses glass/glasses dish/dishes bench/benches watch/watches peach/peaches
    baby/babies city/cities cherry/cherries party/parties story/stories lady/ladies leaf/leaves wolf/wolves
    knife/knives wife/wives shelf/shelves child/children man/men woman/women foot/feet tooth/teeth goose/geese
    mouse/mice sheep/sheep potato/potatoes tomato/tomatoes hero/heroes"""
)

PASTS = pairs(
    """walk/walked play/played open/opened jump/jumped call/called help/helped like/liked use/used move/moved
    close/closed stop/stopped plan/planned try/tried carry/carried study/studied go/went see/saw eat/ate run/ran
    sing/sang swim/swam drink/drank begin/began give/gave take/took make/made come/came know/knew write/wrote
    drive/drove speak/spoke break/broke choose/chose buy/bought think/thought bring/brought teach/taught"""
)

SIZES = words("ant mouse rabbit sheep horse elephant whale")
"""Animals, each clearly larger than the one before."""

DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = words("January February March April May June July August September October November December")
