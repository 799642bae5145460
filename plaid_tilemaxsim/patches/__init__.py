"""Patch files that put the scorer flag into colbert-ai itself, and the code that applies them."""
