"""Files: written whole or not at all, YAML, the cache folder, locks."""
