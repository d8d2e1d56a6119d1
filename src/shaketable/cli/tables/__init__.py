"""What the verbs print: tables and live views."""
