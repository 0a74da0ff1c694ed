"""``kvloom bench``: ratios against what a user would pick instead, measured here."""
