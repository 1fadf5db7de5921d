"""Prompts, demonstrations and preference pairs, from the hub or from files, as token ids. README.md is for users.

sources.py reads records, layouts.py finds prompt and responses in each, encoding.py makes token ids of them, and
loading.py does all of it.
"""
