"""Which cases of a benchmark are asked for, by words of their names."""

from __future__ import annotations


class Choice:
    """Which cases are asked for: alternatives between commas, each a few words that a name must all have."""

    def __init__(self, only: list[str], without: list[str]) -> None:
        self.only, self.without = (
            [part.split() for part in " ".join(words).split(",") if part.split()] for words in (only, without)
        )

    def has(self, name: str) -> bool:
        """Whether a case of this name is asked for."""
        fits = [[all(word in name for word in words) for words in parts] for parts in (self.only, self.without)]
        return (not self.only or any(fits[0])) and not any(fits[1])
