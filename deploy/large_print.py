"""Large print: a figure such as `51.6 %` in letters three lines high, for terminals."""

# Pixels of 3 x 5, two of a column in each character.
_LETTERS = {
    "0": ("█▀█", "█ █", "▀▀▀"),
    "1": ("▄█ ", " █ ", "▀▀▀"),
    "2": ("▀▀█", "█▀▀", "▀▀▀"),
    "3": ("▀▀█", " ▀█", "▀▀▀"),
    "4": ("█ █", "▀▀█", "  ▀"),
    "5": ("█▀▀", "▀▀█", "▀▀▀"),
    "6": ("█▀▀", "█▀█", "▀▀▀"),
    "7": ("▀▀█", "  █", "  ▀"),
    "8": ("█▀█", "█▀█", "▀▀▀"),
    "9": ("█▀█", "▀▀█", "▀▀▀"),
    ".": (" ", " ", "▀"),
    "%": ("▀ █", "▄▀ ", "▀ ▀"),
    " ": (" ", " ", " "),
}


def enlarge(figure: str) -> str:
    """The figure's three lines; it is made of digits, point, space and percent sign."""
    return "\n".join(
        " ".join(parts).rstrip() for parts in zip(*map(_LETTERS.__getitem__, figure), strict=True)
    )
