"""Makes text from a trace one that a terminal only shows: names may hold anything, escape sequences included."""


def printable(text: str, *, keep: str = "") -> str:
    """Return the text with `?` for each character that is neither printable nor in `keep`."""
    return "".join(c if c.isprintable() or c in keep else "?" for c in text)
