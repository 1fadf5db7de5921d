"""Prompts, demonstrations and preference pairs, from the hub or from files, as token ids. README.md
is for users.

sources.py reads records, layouts.py finds prompt and responses in them, encoding.py makes token
ids, loading.py all.
"""
