"""Calls to what is not ours: users' functions, with time limits, and endpoints on the network."""
