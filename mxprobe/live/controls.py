"""Holds what the user has chosen by keys: sorting, filter, pause, scrolling."""

from dataclasses import dataclass

SORTS: tuple[str, ...] = ("output_error", "zeros", "rollout", "module")
HELP = "s sort · r reverse · / filter · j k scroll · p pause · q quit"


@dataclass
class Controls:
    sort: str = SORTS[0]
    reverse: bool = False
    filter: str = ""
    typing: str | None = None
    """The filter being typed; None while none is."""
    is_paused: bool = False
    has_quit: bool = False
    is_shown_once: bool = False
    """Nobody can press a key."""
    offset: int = 0
    """Rows scrolled past."""

    def press(self, key: str) -> None:
        """Act on a key; keys that mean nothing are ignored."""
        if self.typing is not None:
            self._type(key)
            return
        match key:
            case "q" | "Q":
                self.has_quit = True
            case "p" | " ":
                self.is_paused = not self.is_paused
            case "s":
                self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]
                self.offset = 0
            case "r":
                self.reverse = not self.reverse
                self.offset = 0
            case "/" | "f":
                self.typing = self.filter
            case "j" | "down":
                self.offset += 1
            case "k" | "up":
                self.offset = max(self.offset - 1, 0)
            case "page down":
                self.offset += 10
            case "page up":
                self.offset = max(self.offset - 10, 0)
            case "escape":
                self.filter, self.offset = "", 0
            case _:
                pass

    def _type(self, key: str) -> None:
        typed = self.typing or ""
        if key == "enter":
            self.filter, self.typing, self.offset = typed, None, 0
        elif key == "escape":
            self.typing = None
        elif key == "backspace":
            self.typing = typed[:-1]
        elif len(key) == 1 and key.isprintable():
            self.typing = typed + key
