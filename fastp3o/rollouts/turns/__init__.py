"""Responses of several turns: environments that answer the policy, tools, and the sampler of
trajectories.
"""
