"""The ladder of `shaketable harden`: repairs, cheapest first, each scored before the next one is tried."""
