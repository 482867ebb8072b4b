"""Words that tasks are made of: keys of needles, and the people, trades and towns of questions."""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ADJECTIVES = _words(
    """
    amber ancient bitter blunt brave brisk calm clever coarse copper crisp curly damp dusty
    eager early faint fierce floral frosty gentle gilded golden grim hollow humble icy idle
    jolly keen lanky lavish lazy lively lonely loyal lucky mellow merry misty modest narrow
    nimble noble patient plain polite proud quiet rapid rustic salty scarlet shallow silent
    silver simple sleepy slender smooth solemn spotted steady stern sturdy subtle sunny tender
    thirsty tidy timid urban velvet vivid wary weary windy wise witty wooden
    """
)
"""Never in a key twice with one noun, so that ``amber anchor`` names one thing."""

NOUNS = _words(
    """
    anchor apron arrow basket beacon bell blanket bottle bridge broom bucket button candle canoe
    carpet castle chimney clock compass cradle curtain dagger drum engine feather fence fiddle
    flask garden hammer hammock harbor helmet hinge kettle ladder lantern lemon lever locket
    magnet mantle marble mirror mitten needle nutmeg orchard paddle parcel pebble pepper pillow
    pocket quilt rafter ribbon rocket saddle sail scarf shovel shutter sickle spindle spoon
    stool tablet teapot thimble ticket timber trumpet tunnel turnip violin wagon whistle window
    zipper
    """
)

FIRST_NAMES = _words(
    """
    Adela Bastian Corin Dorthea Edwin Fenna Gustav Hedda Ivor Jolanda Kaspar Lenore Milo Nadine
    Oskar Petra Quentin Romy Stellan Tamsin Ulrich Verena Wendel Xenia Yorick Zelda
    """
)

LAST_NAMES = _words(
    """
    Abernethy Brandvold Castellan Dunmore Eskildsen Farquhar Gallowby Hartvig Ingersoll Jessop
    Kettering Lindqvist Merriweather Nordahl Oakeshott Pennington Quillfeather Rasmussen
    Satterlee Thistlewood Underhay Vanterpool Wetherby Yarborough Zimmerli
    """
)

TRADES = _words(
    """
    baker barber bookbinder brewer carpenter clockmaker cobbler cooper dentist gardener glazier
    goldsmith miller painter piper plumber potter printer saddler sculptor tailor tanner weaver
    """
)

TOWNS = _words(
    """
    Aldermoor Brackenfield Cinderwick Dovermill Eskhaven Fennimore Glimmerford Hollowbeck
    Ironbridge Juniperton Kestrelby Larkspur Marrowgate Nettlecombe Otterburn Pinwhistle
    Quarrington Ravensholm Saltmarket Thornaby Umberleigh Vexford Willowdale Yewtree Zephyrton
    """
)
